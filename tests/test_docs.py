"""The notebook of the tutorial runs from top to bottom."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
NOTEBOOK = ROOT / "docs/get-started/tutorial.ipynb"


@pytest.mark.slow
def test_the_notebook_runs(tmp_path):
    cells = json.loads(NOTEBOOK.read_text("utf-8"))["cells"]
    code = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
    assert "FOLDERS" in code[0]
    toy = tmp_path / "toy"
    words = [sys.executable, "-m", "damex.toydata", "--out", str(toy)]
    subprocess.run(words, check=True, capture_output=True)
    folders = {name: str(toy / name) for name in ("photos", "arcade")}
    options = {"train_dataloader.sampler.samples_per_epoch": 16}
    code[0] = (
        f"FOLDERS, EPOCHS, OPTIONS = {folders!r}, 1, {options!r}\n"
        f"WORK_DIR = {str(tmp_path / 'run')!r}"
    )
    program = tmp_path / "notebook.py"
    program.write_text("\n\n".join(code), "utf-8")
    found = subprocess.run(
        [sys.executable, program.name],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )
    assert found.returncode == 0, found.stdout[-3000:] + found.stderr[-3000:]
    assert (tmp_path / "run" / "mixture.onnx").is_file()
    assert "checkpoint: " in found.stdout
