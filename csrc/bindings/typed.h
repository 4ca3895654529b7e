// Types that say in a signature what a plain dict, sequence or object is to have. Nothing is
// checked by them: pybind11 writes their names into signatures, from which the stubs are generated.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <pybind11/pybind11.h>
#include <pybind11/typing.h>

namespace dflash::bindings {

using Counts = pybind11::typing::Dict<pybind11::str, pybind11::int_>;
// Values of several types.
using Fields = pybind11::typing::Dict<pybind11::str, pybind11::object>;

template <class Item>
class SequenceOf : public pybind11::sequence {
  using sequence::sequence;
};

// An array of int32 as it is: no array-like is converted to one.
class BlockTableArgument : public pybind11::object {
  PYBIND11_OBJECT_DEFAULT(BlockTableArgument, object, PyObject_Type)
};
class ErrorClass : public pybind11::object {
  PYBIND11_OBJECT_DEFAULT(ErrorClass, object, PyType_Check)
};

}  // namespace dflash::bindings

namespace pybind11::detail {

template <class Item>
struct handle_type_name<dflash::bindings::SequenceOf<Item>> {
  static constexpr auto name =
      const_name("collections.abc.Sequence[") + make_caster<Item>::name + const_name("]");
};
template <>
struct handle_type_name<dflash::bindings::BlockTableArgument> {
  static constexpr auto name = const_name("numpy.typing.NDArray[numpy.int32]");
};
template <>
struct handle_type_name<dflash::bindings::ErrorClass> {
  static constexpr auto name = const_name("type[BaseException]");
};

}  // namespace pybind11::detail
