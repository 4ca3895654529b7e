// Attention of a step's rows over paged keys and values, on the threads of a pool. A row's bits are
// those of operators/attention.h, whatever else is computed beside it.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

#include "base/result.h"
#include "compute/cpu/instruction_sets.h"
#include "compute/cpu/page_buffer.h"
#include "compute/cpu/thread_pool.h"
#include "compute/operators/attention.h"
#include "compute/operators/attention_plan.h"
#include "compute/operators/paged_kv.h"
#include "compute/operators/rows.h"

namespace dflash::compute {

// Memory that calls of one thread use again. Two calls at the same time need one each.
struct AttentionScratch {
  PageBuffer threads;   // rows, scores and states of each pool thread
  PageBuffer partials;  // states of single tiles, of rows whose tiles several threads compute
};

// Writes the attention of each row of `queries` [num_rows, num_heads * key_size] to `out`
// [num_rows, num_heads * value_size]. Query head h reads kv head h / (num_heads / num_kv_heads).
// The keys and values of the rows themselves are in `kv` already. Errors: kInvalidArgument for
// arguments that do not fit each other; kOutOfMemory; kRange naming the first row with a finite
// value that out's dtype cannot hold, after all rows were written.
Status paged_attention(ThreadPool& pool, Isa isa, const KvView& kv, const AttentionPlan& plan,
                       const AttentionForm& form, uint32_t num_heads, const RowsView& queries,
                       const RowsTarget& out, AttentionScratch& scratch);

}  // namespace dflash::compute
