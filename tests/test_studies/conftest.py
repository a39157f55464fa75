"""Quick runs of studies, and what they found."""

from importlib import import_module

import pytest
import torch

from studies.harness import Session

VARIANTS = ("data of seed", "released code")


@pytest.fixture
def generator():
    return torch.Generator().manual_seed(0)


@pytest.fixture(scope="module")
def result(request):
    """The quick run of the study that the test file is named after."""
    name = request.path.stem.removeprefix("test_")
    return import_module(f"studies.{name}.study").run(Session(quick=True))


@pytest.fixture(scope="module")
def mean(result):
    """``mean(name, where)``: of the row whose settings start so and name no variant."""

    def find(name, where):
        (row,) = (
            row
            for row in result.rows
            if row.name == name
            and row.settings.startswith(where)
            and not any(variant in row.settings for variant in VARIANTS)
        )
        return row.mean

    return find
