"""Where scoring and drawing meet the device: the pass of a device, found by its type.

Owns: the choice. It checks nothing (seawall.ops does), and it waits for no device: what CUDA
computes here is read by whoever wants it.

    seawall.ops      checked arguments, group     \
                                                   >  entry  ->  cpu.py | cuda.py
    seawall.runner   valid by construction        /
"""

import importlib
from typing import Protocol, cast

import torch

from seawall.core.errors import ConfigError
from seawall.sampling.logprobs import Ask, LogprobResult
from seawall.sampling.sampler import DrawInput, SampleResult
from seawall.sampling.tiles import LogitsInput

# Imported when a tensor of that device comes: only CUDA needs triton.
_PASSES = {"cpu": "seawall.sampling.cpu", "cuda": "seawall.sampling.cuda"}


class DevicePass(Protocol):
    """What each device's module offers; results lie on the device of the inputs."""

    def score_rows(self, source: LogitsInput, ask: Ask, workspace_bytes: int) -> LogprobResult:
        """Score every row, block by block."""
        ...

    def sample_rows(
        self, source: LogitsInput, draw: DrawInput, workspace_bytes: int, id_base: int = 0
    ) -> SampleResult:
        """Draw one token for every row; noise takes id 0 of the weight for `id_base`."""
        ...

    def smallest_workspace(
        self, source: LogitsInput, ask: Ask | None = None, draw: DrawInput | None = None
    ) -> int:
        """Fewest bytes that a call which scores or draws can work in."""
        ...


def device_pass(device: torch.device) -> DevicePass:
    """The pass that serves tensors of a device.

    Raises:
        ConfigError: there is none, or the library that it needs is not installed.
    """
    name = _PASSES.get(device.type)
    if name is None:
        raise ConfigError(
            f"device: {device.type} is not one of {', '.join(_PASSES)}; move hidden and weight"
        )
    try:
        module = importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] != "triton":
            raise
        raise ConfigError(
            "device: cuda needs triton, which is not installed; "
            "install a CUDA build of torch, which brings it"
        ) from error
    return cast("DevicePass", module)


def score_rows(source: LogitsInput, ask: Ask, workspace_bytes: int) -> LogprobResult:
    """Score every row on the device it lies on."""
    return device_pass(source.hidden.device).score_rows(source, ask, workspace_bytes)


def sample_rows(source: LogitsInput, draw: DrawInput, workspace_bytes: int) -> SampleResult:
    """Draw one token for every row on the device it lies on."""
    return device_pass(source.hidden.device).sample_rows(source, draw, workspace_bytes)
