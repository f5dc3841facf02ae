"""What the README tells a newcomer to type does what the README says."""

from __future__ import annotations

import asyncio
import os
import re
import subprocess
import sys
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
Sites = Callable[..., AbstractAsyncContextManager[Any]]


async def test_the_python_example_holds_two_turns_and_the_second_reuses_the_first(
    site: Sites, tmp_path: Path
) -> None:
    (example,) = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    (port,) = re.findall(r"serve smollm2 .*--grpc-port (\d+)", README)
    assert f'Client("127.0.0.1:{port}")' in example
    script = tmp_path / "two_turns.py"
    async with site() as it:
        script.write_text(example.replace(f"127.0.0.1:{port}", it.address), encoding="utf-8")
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            str(script),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
        )
        async with asyncio.timeout(30):
            said = (await process.communicate())[0].decode()
    assert process.returncode == 0, said
    told = re.findall(r"\[(\d+) of (\d+) prompt tokens were reused\]", said)
    (first, _), (second, of_second) = [(int(reused), int(of)) for reused, of in told]
    assert first == 0
    assert of_second / 2 < second < of_second
