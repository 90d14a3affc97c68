"""What kind of machine this is, as far as the last bits of a result depend on it.

Another processor, another number of threads or another release of a library may sum in another order: ranks that differ
in these are not compared, neither their states nor what they replay.
"""

from __future__ import annotations

from typing import Any


def kind(torch: Any) -> str:
    """Equal on ranks whose results are equal bit for bit."""
    names = [
        torch.__version__,
        torch.backends.cpu.get_cpu_capability(),
        _processor(),
        f"{torch.get_num_threads()} threads",
    ]
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        device = torch.cuda.get_device_properties(torch.cuda.current_device())
        names += [device.name, str(torch.version.cuda), str(torch.backends.cudnn.version())]
    return ", ".join(names)


def _processor() -> str:
    """Vendor, family, model and name, as Linux has them."""
    wanted = ("vendor_id", "cpu family", "model", "model name", "stepping")
    found: dict[str, str] = {}
    try:
        with open("/proc/cpuinfo", encoding="ascii", errors="replace") as lines:
            for line in lines:
                name, _, value = line.partition(":")
                if name.strip() in wanted:
                    found.setdefault(name.strip(), value.strip())
                if not line.strip() and found:
                    break
    except OSError:
        return "unknown"
    return " ".join(found.get(name, "") for name in wanted)
