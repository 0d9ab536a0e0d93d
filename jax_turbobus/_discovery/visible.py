"""Which GPUs a process sees, and in what order: ``CUDA_VISIBLE_DEVICES``."""

from collections.abc import Mapping, Sequence

__all__ = ["visible_gpus"]


def visible_gpus(
    uuids: Sequence[str], names: Sequence[str], environ: Mapping[str, str]
) -> tuple[list[int], list[str]]:
    """Returns the GPUs in CUDA's order, as indices into `uuids`, and remarks.

    CUDA's rules: an entry is an ordinal or the beginning of exactly one UUID;
    the first entry that names no GPU ends the list; a GPU named twice hides all.

    Args:
      uuids: of all GPUs, in the order of PCI addresses.
      names: of all GPUs, in the same order.
      environ: the environment variables.
    """
    remarks: list[str] = []
    value = environ.get("CUDA_VISIBLE_DEVICES")
    by_pci = environ.get("CUDA_DEVICE_ORDER", "").upper() == "PCI_BUS_ID"
    uses_ordinals = value is None or any(
        entry.strip().lstrip("-").isdigit() for entry in value.split(",")
    )
    if len(set(names)) > 1 and not by_pci and uses_ordinals:
        remarks.append(
            "GPUs of different kinds: CUDA numbers the fastest first; set "
            "CUDA_DEVICE_ORDER=PCI_BUS_ID so that its numbers mean what is shown here"
        )
    if value is None:
        return list(range(len(uuids))), remarks
    order: list[int] = []
    for entry in (part.strip() for part in value.split(",")):
        gpu = _find(entry, uuids)
        if gpu is None:
            if entry not in ("", "-1", "NoDevFiles"):
                kind = "a MIG slice" if entry.startswith("MIG-") else "no GPU here"
                remarks.append(
                    f"CUDA_VISIBLE_DEVICES={value!r}: {entry!r} is {kind}; it and "
                    f"what follows it is left out"
                )
            break
        if gpu in order:
            remarks.append(
                f"CUDA_VISIBLE_DEVICES={value!r}: {entry!r} names a GPU that is "
                f"already in the list; CUDA then shows no GPU at all"
            )
            return [], remarks
        order.append(gpu)
    return order, remarks


def _find(entry: str, uuids: Sequence[str]) -> int | None:
    if entry.isdigit():
        return int(entry) if int(entry) < len(uuids) else None
    if not entry.startswith("GPU-"):
        return None
    matches = [i for i, uuid in enumerate(uuids) if uuid.startswith(entry)]
    return matches[0] if len(matches) == 1 else None
