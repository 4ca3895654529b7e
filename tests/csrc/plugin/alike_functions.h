// Whether a function that is called by name has the arguments that its vendor's header declares.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <type_traits>

namespace dflash::toys {

// Handles are pointers to whatever the vendor calls it; behind a pointer, numbers count.
template <class Ours, class Theirs>
constexpr bool is_alike() {
  if constexpr (std::is_pointer_v<Ours> && std::is_pointer_v<Theirs>) {
    using Our = std::remove_cv_t<std::remove_pointer_t<Ours>>;
    using Their = std::remove_cv_t<std::remove_pointer_t<Theirs>>;
    constexpr bool is_number = std::is_scalar_v<Our> && std::is_scalar_v<Their>;
    if constexpr (is_number) return is_alike<Our, Their>();
    return true;
  } else {
    return sizeof(Ours) == sizeof(Theirs) && std::is_pointer_v<Ours> == std::is_pointer_v<Theirs> &&
           std::is_floating_point_v<Ours> == std::is_floating_point_v<Theirs>;
  }
}
template <class Ours, class Theirs>
struct Alike : std::false_type {};
template <class R, class... A, class S, class... B>
  requires(sizeof...(A) == sizeof...(B))
struct Alike<R(A...), S(B...)> : std::bool_constant<is_alike<R, S>() && (is_alike<A, B>() && ...)> {
};

static_assert(Alike<int(void*, size_t), int(char*, unsigned long)>::value);
static_assert(!Alike<int(void*, size_t), int(void*, unsigned)>::value &&
              !Alike<int(size_t*), int(int*)>::value);
static_assert(!Alike<int(void*), int(void*, int)>::value && !Alike<int(float*), int(int**)>::value);

#define DFLASH_SAME(member, name, type)                                                       \
  static_assert(::dflash::toys::Alike<type, std::remove_pointer_t<decltype(&::name)>>::value, \
                "the vendor's " #name " has other arguments");

}  // namespace dflash::toys
