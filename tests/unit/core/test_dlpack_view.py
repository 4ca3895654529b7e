"""DlpackView against NumPy and torch: addresses, shapes, strides, lifetimes, and the tensors it
must refuse.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import gc
import weakref

import numpy as np
import pytest

from dflash_moe import _core, errors


class Array(np.ndarray):
    """Can be referenced weakly."""


def test_a_numpy_view_is_described_in_elements() -> None:
    base = np.arange(60, dtype=np.float32).reshape(6, 10)
    view = base[1:, 2::3]
    described = _core.DlpackView(view.__dlpack__())
    assert (described.address, described.shape, described.dtype) == (view.ctypes.data, (5, 3), "f32")
    assert described.strides == (10, 3)


@pytest.mark.parametrize(("dtype", "name"), [(np.float16, "f16"), (np.int32, "i32"), (np.int64, "i64")])
def test_dtypes_have_the_projects_names(dtype: type[np.generic], name: str) -> None:
    assert _core.DlpackView(np.zeros((2, 2), dtype).__dlpack__()).dtype == name


@pytest.mark.parametrize("dtype", [np.float64, np.uint8, np.complex64])
def test_other_dtypes_are_refused_by_what_they_are(dtype: type[np.generic]) -> None:
    with pytest.raises(errors.ConfigError, match="bits"):
        _core.DlpackView(np.zeros(2, dtype).__dlpack__())


def test_the_tensor_lives_as_long_as_its_view() -> None:
    array = np.zeros(8, np.float32).view(Array)
    alive = weakref.ref(array)
    view = _core.DlpackView(array.__dlpack__())
    del array
    gc.collect()
    assert alive() is not None
    assert view.shape == (8,)
    del view
    gc.collect()
    assert alive() is None


def test_a_capsule_is_used_once_and_anything_else_is_refused() -> None:
    capsule = np.zeros(2, np.float32).__dlpack__()
    _core.DlpackView(capsule)
    for wrong in (capsule, object(), np.zeros(2)):
        with pytest.raises(errors.ConfigError, match="capsule"):
            _core.DlpackView(wrong)


def test_a_refused_capsule_stays_the_callers() -> None:
    array = np.zeros(4, np.float64).view(Array)
    alive = weakref.ref(array)
    capsule = array.__dlpack__()
    with pytest.raises(errors.ConfigError):
        _core.DlpackView(capsule)
    del array, capsule
    gc.collect()
    assert alive() is None


def test_torch_tensors_of_either_capsule_kind_are_taken() -> None:
    torch = pytest.importorskip("torch")
    tensor = torch.zeros(3, 4, dtype=torch.bfloat16)[:, 1:]
    for capsule in (torch.utils.dlpack.to_dlpack(tensor), tensor.__dlpack__(max_version=(1, 0))):
        view = _core.DlpackView(capsule)
        assert (view.address, view.shape, view.strides, view.dtype) == (tensor.data_ptr(), (3, 3), (4, 1), "bf16")
