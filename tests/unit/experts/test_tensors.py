"""Tensors of every kind become addresses without a copy where the layout allows it, and readable
errors where they do not fit.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from dflash_moe.errors import ConfigError, UnsupportedError
from dflash_moe.experts.layer_table import LayerShape
from dflash_moe.experts.tensors import HostTensors

torch = pytest.importorskip("torch")
IN, OUT, TOP_K = 6, 5, 2


def torch_call(num_tokens: int = 3, dtype: Any = None) -> list[Any]:
    hidden = torch.zeros(num_tokens, IN, dtype=dtype or torch.float32)
    return [hidden, torch.zeros(num_tokens, TOP_K, dtype=torch.int64), torch.zeros(num_tokens, TOP_K)]


def numpy_call(num_tokens: int = 3) -> list[Any]:
    hidden = np.zeros((num_tokens, IN), np.float32)
    return [hidden, np.zeros((num_tokens, TOP_K), np.int32), np.zeros((num_tokens, TOP_K), np.float32)]


def bind(call: list[Any], out: Any = None) -> tuple[Any, Any]:
    result, batch, deliver = HostTensors().bind(LayerShape(0, IN, OUT), *call, out)
    assert deliver is None
    return result, batch


FLOATS = [("float32", "f32", 4), ("bfloat16", "bf16", 2), ("float16", "f16", 2)]


@pytest.mark.parametrize(("dtype", "name", "item_bytes"), FLOATS)
def test_torch_tensors_are_taken_where_they_lie(dtype: str, name: str, item_bytes: int) -> None:
    call = torch_call(dtype=getattr(torch, dtype))
    result, batch = bind(call)
    assert (batch.hidden_states, batch.row_stride_bytes, batch.dtype) == (call[0].data_ptr(), IN * item_bytes, name)
    assert (batch.num_tokens, batch.top_k) == (3, TOP_K)
    assert (batch.topk_ids, batch.ids_are_64bit) == (call[1].data_ptr(), True)
    assert (batch.topk_weights, batch.weights_dtype) == (call[2].data_ptr(), "f32")
    assert batch.output == result.data_ptr()
    assert result.shape == (3, OUT)
    assert result.dtype == call[0].dtype


def test_rows_with_a_stride_are_not_copied() -> None:
    wide = torch.zeros(3, 2 * IN)
    call = torch_call()
    call[0] = wide[:, IN:]
    _, batch = bind(call)
    assert batch.hidden_states == wide.data_ptr() + IN * 4
    assert batch.row_stride_bytes == 2 * IN * 4


def test_scattered_elements_and_repeated_rows_are_copied() -> None:
    call = torch_call()
    call[0] = torch.arange(3.0 * IN).reshape(IN, 3).T
    _, batch = bind(call)
    kept = batch.owners[0]
    assert batch.hidden_states == kept.data_ptr() != call[0].data_ptr()
    assert torch.equal(kept, call[0])
    call[0] = torch.zeros(1, IN).expand(3, IN)
    assert bind(call)[1].row_stride_bytes == IN * 4


def test_transposed_ids_and_weights_are_copied_and_kept_alive() -> None:
    call = torch_call()
    call[1] = torch.arange(TOP_K * 3).reshape(TOP_K, 3).T
    _, batch = bind(call)
    assert torch.equal(batch.owners[1], call[1])
    assert batch.topk_ids == batch.owners[1].data_ptr()


def test_lazily_negated_tensors_are_read_as_what_they_stand_for() -> None:
    for at in (0, 2):
        call = torch_call()
        call[at] = torch._neg_view(torch.ones_like(call[at]))
        kept = bind(call)[1].owners[at]
        assert not kept.is_neg()
        assert torch.equal(kept, -torch.ones_like(kept))


def test_sparse_tensors_are_refused_with_the_way_out() -> None:
    call = torch_call()
    call[0] = call[0].to_sparse()
    with pytest.raises(ConfigError, match="layout: hidden_states is torch.sparse_coo.*to_dense"):
        bind(call)


@pytest.mark.parametrize("out", [torch._neg_view(torch.zeros(3, OUT)), torch.zeros(3, OUT, requires_grad=True)])
def test_an_output_whose_memory_is_not_its_value_is_refused(out: Any) -> None:
    with pytest.raises(ConfigError, match="out: found a lazily negated"):
        bind(torch_call(), out)


def test_a_given_output_receives_the_result() -> None:
    out = torch.zeros(3, OUT)
    result, batch = bind(torch_call(), out)
    assert result is out
    assert batch.output == out.data_ptr()


@pytest.mark.parametrize(
    "out",
    [torch.zeros(3, OUT + 1), torch.zeros(3, OUT, dtype=torch.float16), torch.zeros(3, 2 * OUT)[:, ::2], np.zeros((3, OUT))],
)
def test_an_output_that_does_not_fit_is_refused(out: Any) -> None:
    with pytest.raises(ConfigError, match="out: found"):
        bind(torch_call(), out)


def test_numpy_arrays_give_numpy_results() -> None:
    call = numpy_call()
    result, batch = bind(call)
    assert isinstance(result, np.ndarray)
    assert result.dtype == np.float32
    assert batch.hidden_states == call[0].ctypes.data
    assert batch.ids_are_64bit is False
    call[0] = np.zeros((3, 2 * IN), np.float32)[:, :IN]
    assert bind(call)[1].row_stride_bytes == 2 * IN * 4
    call[0] = np.zeros((IN, 3), np.float32).T
    assert bind(call)[1].row_stride_bytes == IN * 4


class Foreign:
    """A tensor of an unknown framework: nothing but DLPack."""

    def __init__(self, tensor: Any) -> None:
        self.tensor = tensor

    def __dlpack__(self, **arguments: Any) -> Any:
        return self.tensor.__dlpack__(**arguments)


def test_any_dlpack_tensor_is_taken_where_it_lies() -> None:
    call = torch_call()
    result, batch = bind([Foreign(tensor) for tensor in call])
    assert batch.hidden_states == call[0].data_ptr()
    assert batch.topk_ids == call[1].data_ptr()
    assert isinstance(result, np.ndarray)


def test_a_bf16_dlpack_result_needs_an_output() -> None:
    call = [Foreign(tensor) for tensor in torch_call(dtype=torch.bfloat16)]
    with pytest.raises(UnsupportedError, match="out="):
        bind(call)
    out = torch.zeros(3, OUT, dtype=torch.bfloat16)
    assert bind(call, Foreign(out))[1].output == out.data_ptr()


WRONG = [
    (0, torch.zeros(3, IN + 1), r"hidden_states: found shape \[3, 7\], expected \[num_tokens, 6\]"),
    (0, torch.zeros(IN), r"hidden_states: found shape \[6\]"),
    (0, torch.zeros(3, IN, dtype=torch.float64), "hidden_states: found dtype torch.float64, expected one of f32, f16, bf16"),
    (1, torch.zeros(2, TOP_K, dtype=torch.int64), r"topk_ids: found shape \[2, 2\], expected \[3, top_k\]"),
    (1, torch.zeros(3, 0, dtype=torch.int64), "topk_ids"),
    (1, torch.zeros(3, TOP_K), "topk_ids: found dtype torch.float32, expected one of i32, i64"),
    (2, torch.zeros(3, TOP_K + 1), r"topk_weights: found shape \[3, 3\], expected \[3, 2\] like topk_ids"),
    (2, torch.zeros(3, TOP_K, dtype=torch.int32), "topk_weights: found dtype torch.int32"),
    (1, np.zeros((3, TOP_K)), "tensors must be of one kind"),
    (0, torch.zeros(3, IN, requires_grad=True), "require grad"),
]


@pytest.mark.parametrize(("position", "value", "text"), WRONG)
def test_a_wrong_argument_is_named_with_what_was_found_and_expected(position: int, value: Any, text: str) -> None:
    call = torch_call()
    call[position] = value
    with pytest.raises(ConfigError, match=text):
        bind(call)


def test_a_leaf_that_requires_grad_is_taken_without_grad_mode() -> None:
    call = torch_call()
    call[0].requires_grad_()
    with torch.no_grad():
        bind(call)


def test_another_device_is_unsupported_and_named() -> None:
    call = torch_call()
    call[0] = torch.zeros(3, IN, device="meta")
    with pytest.raises(UnsupportedError, match="hidden_states on meta"):
        bind(call)


def test_something_that_is_no_tensor_is_refused() -> None:
    with pytest.raises(ConfigError, match="hidden_states: found list, expected a torch, NumPy or DLPack tensor"):
        bind([[1.0], [1], [1.0]])


def test_an_empty_batch_binds() -> None:
    for call in (torch_call(0), numpy_call(0)):
        result, batch = bind(call)
        assert tuple(result.shape) == (0, OUT)
        assert batch.num_tokens == 0


def records(num_rows: int, width: int, item: str) -> np.ndarray[Any, Any]:
    """Rows in packed records: neither their address nor their stride is a multiple of an item."""
    packed = np.zeros(num_rows, np.dtype([("tag", "u1"), ("row", item, (width,))]))
    return packed["row"]


@pytest.mark.parametrize("at", [0, 1, 2])
def test_fields_of_packed_records_are_copied_not_shifted(at: int) -> None:
    call = numpy_call()
    odd = records(3, call[at].shape[1], call[at].dtype.str[1:])
    odd[...] = np.arange(odd.size).reshape(odd.shape)
    call[at] = odd
    _, batch = bind(call)
    kept = batch.owners[at]
    assert kept.ctypes.data == (batch.hidden_states, batch.topk_ids, batch.topk_weights)[at]
    np.testing.assert_array_equal(kept, odd)
    assert kept.flags.c_contiguous
    assert kept.flags.aligned


def test_a_field_of_packed_records_is_refused_as_out_and_left_alone() -> None:
    odd = records(3, OUT, "f4")
    before = odd.copy()
    with pytest.raises(ConfigError, match="out: found shape"):
        bind(numpy_call(), odd)
    np.testing.assert_array_equal(odd, before)


def test_the_result_lies_where_hidden_states_do_whatever_torchs_default_device_is() -> None:
    call = torch_call()
    torch.set_default_device("meta")
    try:
        result, _ = bind(call)
    finally:
        torch.set_default_device(None)
    assert result.device == call[0].device
