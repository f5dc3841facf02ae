"""The committed code is what the generator makes of proto/ today."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SOURCE = "proto/ringserve/v1/generation.proto"


def test_the_generated_code_is_fresh(tmp_path: Path) -> None:
    pytest.importorskip("grpc_tools")
    command = [sys.executable, "-m", "grpc_tools.protoc", "-I", "gateway/pb=proto/ringserve/v1"]
    command += [f"--{kind}_out={tmp_path}" for kind in ("python", "pyi", "grpc_python")]
    subprocess.run([*command, SOURCE], cwd=ROOT, check=True)
    made = {path.name: path.read_text() for path in (tmp_path / "gateway/pb").iterdir()}
    assert len(made) == 3
    assert made == {name: (ROOT / "gateway/pb" / name).read_text() for name in made}


def test_proto_holds_no_python() -> None:
    # `proto` is proto-plus's import name, which Ray's dependencies may bring.
    assert not list((ROOT / "proto").rglob("*.py"))
