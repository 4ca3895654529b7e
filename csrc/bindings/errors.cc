// The table from ErrorCode to exception classes, and how an error and its place become arguments.
// SPDX-License-Identifier: Apache-2.0
#include "bindings/errors.h"

namespace py = pybind11;

namespace dflash::bindings {
namespace {

struct ErrorRow {
  ErrorCode code;
  const char* name;
  const char* python_class;
};

constexpr ErrorRow kTable[] = {
    {ErrorCode::kInvalidArgument, "invalid_argument", "ConfigError"     },
    {ErrorCode::kUnsupported,     "unsupported",      "UnsupportedError"},
    {ErrorCode::kProtocol,        "protocol",         "ProtocolError"   },
    {ErrorCode::kCheckpoint,      "checkpoint",       "CheckpointError" },
    {ErrorCode::kWorkerLost,      "worker_lost",      "WorkerLost"      },
    {ErrorCode::kTimeout,         "timeout",          "WorkerTimeout"   },
    {ErrorCode::kRange,           "range",            "WorkerError"     },
    {ErrorCode::kWorkerFailed,    "worker_failed",    "WorkerError"     },
    {ErrorCode::kSystem,          "system",           "DflashError"     },
    {ErrorCode::kOutOfMemory,     "out_of_memory",    "DflashError"     },
    {ErrorCode::kClosed,          "closed",           "DflashError"     },
};

py::object python_class(const char* name) {
  return py::module_::import("dflash_moe.errors").attr(name);
}

// Makes the keyword arguments of DflashError: the code's name, and every field of the place that is
// set.
py::dict fields_of(const ErrorRow& row, const ErrorPlace& place) {
  py::dict fields;
  fields["code"] = row.name;
  if (!place.worker.empty()) fields["worker"] = place.worker;
  if (place.layer) fields["layer"] = *place.layer;
  if (place.token) fields["token"] = *place.token;
  if (place.slot) fields["slot"] = *place.slot;
  return fields;
}

}  // namespace

void raise(const Error& error) {
  for (const ErrorRow& row : kTable) {
    if (row.code != error.code) continue;
    const py::object cls = python_class(row.python_class);
    const py::object raised = cls(error.message, **fields_of(row, error.place));
    PyErr_SetObject(cls.ptr(), raised.ptr());
    throw py::error_already_set();
  }
  check(false, "an ErrorCode has no row in the exception table");
  std::abort();
}

py::typing::Dict<py::str, py::typing::Tuple<py::int_, ErrorClass>> error_codes() {
  py::typing::Dict<py::str, py::typing::Tuple<py::int_, ErrorClass>> table;
  for (const ErrorRow& row : kTable) {
    table[row.name] = py::make_tuple(static_cast<int>(row.code), python_class(row.python_class));
  }
  return table;
}

}  // namespace dflash::bindings
