"""The CPU runtime and the null meter: what the engine asks of a device without one."""

import torch

from seawall.device.cpu import CpuRuntime
from seawall.device.meter import Meter, NullMeter
from seawall.device.runtime import DeviceMemory, Runtime


def test_cpu_runtime_witnesses_this_process() -> None:
    runtime: Runtime = CpuRuntime()
    before = runtime.memory()
    block = torch.ones(48 << 20, dtype=torch.uint8)
    after = runtime.memory()
    assert runtime.device == torch.device("cpu")
    assert "cpu" in runtime.name
    assert after.in_use_bytes - before.in_use_bytes > block.nbytes // 2
    assert after.peak_bytes >= block.nbytes
    assert isinstance(after, DeviceMemory)
    assert after.available_bytes > 0


def test_cpu_events_have_happened() -> None:
    event = CpuRuntime().event()
    event.record()
    assert event.done()
    event.wait()


def test_null_meter_counts_nothing() -> None:
    meter: Meter = NullMeter()
    with meter, meter.scope("logits"), meter.scope(None):
        tensor = torch.ones(10)
        meter.ignore(tensor)
    meter.reset_peaks()
    assert meter.readings() == {}
