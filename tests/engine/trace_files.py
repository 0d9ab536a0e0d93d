"""What a written trace holds."""

import json


def num_transfers(path):
    events = json.loads(path.read_text())["traceEvents"]
    return sum(event.get("cat") == "transfer" for event in events)
