// How requests are cut for turns: as small as kernels bear at once, larger with each second of
// silence, and never when there is nobody else.
// SPDX-License-Identifier: Apache-2.0
#include "worker/pieces.h"

#include <doctest/doctest.h>

#include <initializer_list>
#include <limits>
#include <numeric>
#include <set>
#include <vector>

#include "request.h"

namespace dflash::worker {
namespace {

constexpr compute::FfnSpec kSpec{.in_size = 4, .intermediate_size = 4, .out_size = 4};
constexpr uint32_t kNumExperts = 6;
constexpr int64_t kSecondNs = 1'000'000'000, kNever = std::numeric_limits<int64_t>::max();

wire::RaggedIndex index_of(const compute::toy::Batch& batch) {
  const toy::Request request = toy::make_request(batch, kSpec);
  wire::RaggedIndex index;
  REQUIRE(index
              .assign(request.layout(kSpec.in_size), request.header.num_rows,
                      request.header.num_pairs, kNumExperts, request.payload)
              .ok());
  return index;
}

// The fewest rows from `first_row` on that give each expert they touch `each` pairs, or all.
uint32_t fewest_rows(const compute::toy::Batch& batch, uint32_t first_row, size_t each) {
  const auto& counts = batch.row_counts;
  auto id = batch.ids.begin() + std::accumulate(counts.begin(), counts.begin() + first_row, 0);
  std::set<uint16_t> touched;
  size_t num_pairs = 0;
  for (uint32_t row = first_row; row < batch.num_rows(); ++row) {
    touched.insert(id, id + counts[row]);
    id += counts[row];
    num_pairs += counts[row];
    if (num_pairs >= each * touched.size()) return row + 1 - first_row;
  }
  return batch.num_rows() - first_row;
}

TEST_CASE("pieces follow one another, as small as the silence allows and as even as they can be") {
  for (const uint32_t num_rows : {1u, 2u, 17u, 200u, 999u}) {
    const compute::toy::Batch batch = toy::wire_batch(kSpec, kNumExperts, num_rows, num_rows);
    const wire::RaggedIndex index = index_of(batch);
    for (const int64_t seconds : {0, 1, 2, 7, 60}) {
      for (const int64_t quiet_ns : {seconds * kSecondNs, (seconds + 1) * kSecondNs - 1}) {
        CAPTURE(num_rows);
        CAPTURE(quiet_ns);
        PieceCutter cutter;
        Piece piece;
        uint32_t num_done = 0, pairs_done = 0;
        while (num_done < num_rows) {
          piece = cutter.next(index, piece, kNumExperts, quiet_ns);
          REQUIRE(piece.first_row == num_done);
          REQUIRE(piece.first_pair == pairs_done);
          const uint32_t fewest =
              fewest_rows(batch, num_done, kPairsPerExpert * static_cast<size_t>(1 + seconds));
          CHECK(piece.num_rows >= fewest);
          CHECK(piece.num_rows < 2 * fewest);
          num_done += piece.num_rows;
          pairs_done += piece.num_pairs;
        }
        CHECK(num_done == num_rows);
        CHECK(pairs_done == batch.ids.size());
      }
    }
  }
}

TEST_CASE(
    "a request is cut at once, in larger pieces after a silence, and never where nobody asked") {
  const compute::toy::Batch batch = toy::wire_batch(kSpec, kNumExperts, 999, 1);
  const wire::RaggedIndex index = index_of(batch);
  PieceCutter cutter;
  const auto rows_of_first = [&](int64_t quiet_ns) {
    return cutter.next(index, {}, kNumExperts, quiet_ns).num_rows;
  };
  CHECK(rows_of_first(0) < 20);
  CHECK(rows_of_first(3 * kSecondNs) > 2 * rows_of_first(0));
  CHECK(rows_of_first(3 * kSecondNs) < 100);
  CHECK(rows_of_first(kNever) == 999);
}

}  // namespace
}  // namespace dflash::worker
