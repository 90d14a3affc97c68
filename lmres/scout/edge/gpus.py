"""NVIDIA devices through NVML, if ``pynvml`` (package ``nvidia-ml-py``) and a driver are there.

Only devices that ``CUDA_VISIBLE_DEVICES`` shows are looked at: a host may be shared. What a device does not support it
is not asked again within a reading, and counts as not told.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from lmres.scout.edge.readers import CannotRead
from lmres.scout.health import Gpu

T = TypeVar("T")
MAX_LINKS = 36


class Gpus:
    """Not for several threads at once. Raises CannotRead where there is no device to look at."""

    def __init__(self, nvml: Any = None, environ: Mapping[str, str] = os.environ) -> None:
        self._nvml = nvml if nvml is not None else _import()
        try:
            self._nvml.nvmlInit()
            count = self._nvml.nvmlDeviceGetCount()
        except self._nvml.NVMLError as error:
            raise CannotRead(f"NVML does not start: {error}") from error
        self._visible = self._chosen(count, environ.get("CUDA_VISIBLE_DEVICES"))
        if not self._visible:
            raise CannotRead("no NVIDIA device is visible")

    def read(self) -> tuple[Gpu, ...]:
        return tuple(self._read(index) for index in self._visible)

    def close(self) -> None:
        with contextlib.suppress(self._nvml.NVMLError):
            self._nvml.nvmlShutdown()

    def _chosen(self, count: int, visible: str | None) -> list[int]:
        """Indices among ``count``. Names of devices (UUIDs, or their beginnings) are looked up."""
        if visible is None:
            return list(range(count))
        chosen = []
        for word in filter(None, map(str.strip, visible.split(","))):
            if word.isdecimal():
                chosen.append(int(word))
            else:
                chosen += [i for i in range(count) if self._uuid(i).startswith(word)][:1]
        return [i for i in dict.fromkeys(chosen) if i < count]

    def _uuid(self, index: int) -> str:
        nvml = self._nvml
        try:
            return str(nvml.nvmlDeviceGetUUID(nvml.nvmlDeviceGetHandleByIndex(index)))
        except nvml.NVMLError:
            return ""

    def _read(self, index: int) -> Gpu:
        nvml = self._nvml
        try:
            device = nvml.nvmlDeviceGetHandleByIndex(index)
            remapped = self._told(lambda: nvml.nvmlDeviceGetRemappedRows(device))
            return Gpu(
                index=index,
                name=self._told(lambda: str(nvml.nvmlDeviceGetName(device))) or "",
                uncorrected=self._told(
                    lambda: int(
                        nvml.nvmlDeviceGetTotalEccErrors(
                            device, nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, nvml.NVML_VOLATILE_ECC
                        )
                    )
                ),
                remap_pending=bool(remapped and remapped[2]),
                remap_failed=bool(remapped and remapped[3]),
                links_up=self._links(device),
                celsius=self._told(lambda: int(nvml.nvmlDeviceGetTemperature(device, nvml.NVML_TEMPERATURE_GPU))),
                slowdown_celsius=self._told(
                    lambda: int(
                        nvml.nvmlDeviceGetTemperatureThreshold(device, nvml.NVML_TEMPERATURE_THRESHOLD_SLOWDOWN)
                    )
                ),
            )
        except nvml.NVMLError as error:
            if self._is_lost(error):
                return Gpu(index=index, lost=str(error))
            raise CannotRead(f"GPU {index} can not be asked: {error}") from error

    def _links(self, device: Any) -> tuple[int, ...]:
        up = []
        for link in range(MAX_LINKS):
            state = self._told(lambda link=link: int(self._nvml.nvmlDeviceGetNvLinkState(device, link)))  # type: ignore[misc]
            if state is None:
                break
            if state:
                up.append(link)
        return tuple(up)

    def _told(self, ask: Callable[[], T]) -> T | None:
        """None for what this device or driver does not have. Raises NVMLError when the device is lost."""
        try:
            return ask()
        except self._nvml.NVMLError as error:
            if self._is_lost(error):
                raise
            return None
        except AttributeError:  # an older pynvml
            return None

    def _is_lost(self, error: Any) -> bool:
        lost = (self._nvml.NVML_ERROR_GPU_IS_LOST, self._nvml.NVML_ERROR_RESET_REQUIRED)
        return getattr(error, "value", None) in lost


def _import() -> Any:
    try:
        import pynvml
    except ImportError:
        there = os.path.exists("/dev/nvidiactl")  # noqa: PTH110 (a device)
        hint = "a GPU is here, but the package nvidia-ml-py is not installed" if there else "no NVIDIA driver here"
        raise CannotRead(hint) from None
    except Exception as error:  # a broken installation raises anything
        raise CannotRead(f"pynvml can not be imported: {error!r}") from error
    return pynvml
