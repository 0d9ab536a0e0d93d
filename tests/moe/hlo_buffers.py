"""Which buffers the instructions of an optimized module make and read."""

import re

__all__ = ["Computation", "computations"]


def computations(hlo):
    return [Computation(text) for text in re.split(r"^}", hlo, flags=re.M)]


class Computation:
    """The definitions of a computation, and which buffer a value of it is."""

    def __init__(self, text):
        found = re.findall(r"^\s*(ROOT )?(%\S+) = (.*)$", text, re.M)
        self.definitions = {name: definition for _, name, definition in found}
        self.roots = [name for root, name, _ in found if root]

    def calls(self, target):
        pattern = rf'custom_call_target="{target}"'
        return {n: d for n, d in self.definitions.items() if re.search(pattern, d)}

    def operands(self, name):
        (text,) = re.findall(r" [\w-]+\((%.*?)\)(?:,|$)", self.definitions[name])[:1]
        return re.sub(r"/\*.*?\*/", "", text).split(", ")

    def source(self, name):
        """What makes a buffer: an instruction, and which of its results."""
        text = self.definitions[name]
        part = re.search(r" get-tuple-element\((%\S+)\), index=(\d+)", text)
        if part:
            return self._part(part[1], int(part[2]))
        if re.search(r" (opt-barrier|bitcast)\(", text):
            return self.source(self.operands(name)[0])
        return name, 0

    def _part(self, of, index):
        text = self.definitions[of]
        if " opt-barrier(" in text:
            return self._part(self.operands(of)[0], index)
        if " tuple(" in text:
            return self.source(self.operands(of)[index])
        return of, index

    def buffers(self, name):
        """The buffers that an instruction reads, those of its tuples too."""
        found = []
        for x in self.operands(name):
            is_tuple = " tuple(" in self.definitions[x]
            found += self.buffers(x) if is_tuple else [self.source(x)]
        return found

    def touching(self, made):
        """What reads a buffer of instructions `made`, or returns it."""
        names = [
            name
            for name, text in self.definitions.items()
            if re.search(r" [\w-]+\(%", text)
            and not re.search(r" (tuple|get-tuple-element|opt-barrier)\(", text)
        ]
        return {
            name
            for name in {*names, *self.roots}
            if any(of in made for of, _ in self.buffers(name))
        }
