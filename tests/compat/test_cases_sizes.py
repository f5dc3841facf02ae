"""Activations between stages have no limit of 4 MiB, nor of any size that a frame can have."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from coordinator.frames import Epoch, Frame, Seq
from stage.messages import FrameMessage
from stage.transport import Link


@pytest.mark.parametrize("megabytes", [5, 20, 60])
def test_activations_of_any_size_arrive_whole(tmp_path: Path, megabytes: int) -> None:
    """grpc/grpc#23388, grpc/grpc.io#1254: a message limit that is set on one side only."""
    stage, before = Link(), Link()
    try:
        listener = stage.listen(tmp_path / "stage")
        sender = before.connect(listener.endpoint)
        hidden = torch.arange(megabytes * 250_000, dtype=torch.float32).view(-1, 1000)
        sender.send(FrameMessage(Epoch(0), Frame(Epoch(0), Seq(0)), hidden=hidden))
        delivery = listener.receive()
        assert delivery is not None
        assert isinstance(delivery.message, FrameMessage)
        assert delivery.message.hidden is not None
        assert torch.equal(delivery.message.hidden, hidden)
        sender.close()
        listener.close()
    finally:
        before.close()
        stage.close()
