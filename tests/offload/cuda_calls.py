"""What to ask of calls in a program that XLA compiled for CUDA."""

import re

HOST_TYPE = r"f32\[[\d,]+\]\{[\d,]+:S\(5\)\}"


N = 256  # more than 512 bytes, and matmuls that XLA takes seriously


def assert_host_operand(hlo, line, position):
    """The call's operand at `position` lies in host memory."""
    operands = re.search(r"custom-call\(([^)]*)\)", line)[1].split(", ")
    name = re.escape(operands[position].split()[-1])
    definition = next(
        other for other in hlo.splitlines() if re.match(rf"\s*(ROOT )?{name} = ", other)
    )
    assert "S(5)" in definition, definition


def assert_in_place(line, operand):
    """The call's result is its operand's memory, in host space if it says so."""
    assert re.search(
        rf"output_to_operand_aliasing=\{{\{{\}}: \({operand}, \{{\}}\)\}}", line
    ), line


def assert_done_with_what_was_started(hlo):
    """Each done gets its start's result itself, through ties only."""
    text = re.sub(r"/\*index=\d+\*/", "", hlo)
    definitions = dict(re.findall(r"^\s*(?:ROOT )?(%\S+) = (.*)$", text, re.M))
    for target in ("turbobus_h2d_done", "turbobus_d2h_done"):
        for call in hlo.calls(target):
            name = re.search(r"custom-call\((%[^,)]+)", call)[1]
            while match := re.search(
                r" get-tuple-element\((%\S+)\), index=(\d+)", definitions[name]
            ):
                ties = re.search(
                    r" (?:tuple|opt-barrier)\((.*?)\)", definitions[match[1]]
                )
                if ties is None:
                    break
                name = ties[1].split(", ")[int(match[2])]
            assert '_start"' in definitions[name], f"{definitions[name]} is no start"


def first_matmul(text):
    found = [text.find(word) for word in ("gemm", "dot(", "cublas")]
    return min(position for position in found if position >= 0)
