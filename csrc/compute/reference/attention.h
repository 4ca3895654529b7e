// The readable twin of paged attention: it does what operators/attention.h says, one number after
// another.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "compute/operators/attention.h"
#include "compute/operators/attention_plan.h"
#include "compute/operators/paged_kv.h"
#include "compute/operators/rows.h"

namespace dflash::compute {

// Writes the attention of each row of `queries` [num_rows, num_heads * key_size] to `out`
// [num_rows, num_heads * value_size]. Query head h reads kv head h / (num_heads / num_kv_heads).
// The arguments must fit each other, as paged_attention (cpu/paged_attention.h) checks them; what
// exceeds the range of out's dtype becomes infinite.
void reference_attention(const KvView& kv, const AttentionPlan& plan, const AttentionForm& form,
                         uint32_t num_heads, const RowsView& queries, const RowsTarget& out);

}  // namespace dflash::compute
