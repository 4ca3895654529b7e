// A driver's shared library opened at run time, and the functions found in it.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <dlfcn.h>
#include <link.h>

#include <algorithm>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "base/result.h"

namespace dflash::compute::gpu {

// The paths of the shared libraries in this process whose file names begin with `stem`, the latest
// first.
inline std::vector<std::string> loaded_libraries(const std::string& stem) {
  struct Search {
    const std::string& stem;
    std::vector<std::string> found;
  } search{stem, {}};
  ::dl_iterate_phdr(
      [](dl_phdr_info* info, size_t, void* context) {
        auto& wanted = *static_cast<Search*>(context);
        const std::string path = info->dlpi_name;
        if (path.compare(path.rfind('/') + 1, wanted.stem.size(), wanted.stem) == 0)
          wanted.found.push_back(path);
        return 0;
      },
      &search);
  std::reverse(search.found.begin(), search.found.end());
  return search.found;
}

// Stays open for the life of the process: drivers start threads that outlive their users.
class DriverLibrary {
 public:
  // The first of `names` that can be opened. Errors: kUnsupported naming all of them.
  static Result<DriverLibrary> open(const std::vector<std::string>& names) {
    std::string tried;
    for (const std::string& name : names) {
      if (void* handle = ::dlopen(name.c_str(), RTLD_NOW | RTLD_LOCAL); handle != nullptr)
        return DriverLibrary(handle, name);
      tried += (tried.empty() ? "" : ", ") + name;
    }
    return Error{ErrorCode::kUnsupported, "the driver library was not found (tried " + tried +
                                              "); install the driver of the card"};
  }

  // Errors: kUnsupported naming the function: the driver is older than the first that had it.
  template <class Function>
  Status find(const char* name, Function*& function) const {
    void* symbol = ::dlsym(handle_, name);
    if (symbol == nullptr) {
      return Error{
          ErrorCode::kUnsupported,
          name_ + " has no function " + name + "; the driver is too old for this build, update it"};
    }
    function = reinterpret_cast<Function*>(symbol);
    return ok();
  }
  const std::string& name() const { return name_; }

 private:
  DriverLibrary(void* handle, std::string name) : handle_(handle), name_(std::move(name)) {}
  void* handle_;
  std::string name_;
};

}  // namespace dflash::compute::gpu
