"""Tensors of the host that a device needs."""

from __future__ import annotations

import torch

from cache.pool.upload import upload


def test_what_is_where_it_should_be_is_not_copied() -> None:
    host = torch.arange(3)
    assert upload(host, torch.device("cpu")) is host


def test_a_device_gets_a_copy_of_its_own() -> None:
    there = upload(torch.arange(3), torch.device("meta"))
    assert (there.device.type, there.shape, there.dtype) == ("meta", (3,), torch.int64)


def test_a_copy_to_a_gpu_goes_through_pinned_memory_and_waits_for_nothing() -> None:
    class Host:
        calls: tuple[str, ...] = ()

        def pin_memory(self) -> Host:
            self.calls = (*self.calls, "pin")
            return self

        def to(self, device: torch.device, *, non_blocking: bool = False) -> Host:
            self.calls = (*self.calls, f"to {device}, non_blocking={non_blocking}")
            return self

    host = Host()
    upload(host, torch.device("cuda", 0))  # type: ignore[arg-type]
    assert host.calls == ("pin", "to cuda:0, non_blocking=True")
