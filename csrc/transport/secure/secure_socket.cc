// Records in both directions: ciphertext passes through two buffers, so that many records take one
// system call, and libssl itself never meets the socket (its own BIO would raise SIGPIPE).
// SPDX-License-Identifier: Apache-2.0
#include "transport/secure/secure_socket.h"

#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

#include "transport/secure/libssl.h"

namespace dflash::transport {
namespace {

// Numbers of OpenSSL's interface, from its manual pages.
constexpr int kWantRead = 2;
constexpr int kKeyUpdateNotRequested = 0;

// So much content goes to libssl at once: enough that one system call carries it, and little
// enough that its ciphertext is still in the cache then.
constexpr size_t kContentPerWrite = 4 * kRecordBytes;

// Whether these first bytes can be TLS: a type from change_cipher_spec to application_data, then
// version 3.1 to 3.4 (RFC 8446, section 5.1). The third byte of a frame of the plain protocol,
// whose length has 17 bits, is 0 or belongs to a frame whose first byte is 0.
bool begins_record(std::span<const std::byte> bytes) {
  const auto at = [&](size_t i) { return std::to_integer<unsigned>(bytes[i]); };
  if (at(0) < 0x14 || at(0) > 0x17) return false;
  if (bytes.size() > 1 && at(1) != 3) return false;
  return bytes.size() < 3 || (at(2) >= 1 && at(2) <= 4);
}

}  // namespace

// Takes what the kernel has. Returns false where that is nothing, and notes why.
bool SecureSocket::fetch() {
  if (has_hung_up_ || system_errno_ != 0) return false;
  ssize_t got;
  do {
    got = ::recv(socket_.get(), received_.data(), received_.size(), MSG_DONTWAIT);
  } while (got < 0 && errno == EINTR);
  if (got == 0) has_hung_up_ = true;
  if (got < 0 && errno != EAGAIN && errno != EWOULDBLOCK) system_errno_ = errno;
  if (got <= 0) return false;
  received_begin_ = 0;
  received_end_ = static_cast<size_t>(got);
  if (!has_heard_ && !begins_record(std::span(received_).first(received_end_)))
    is_peer_plain_ = true;
  has_heard_ = true;
  return true;
}

Status SecureSocket::flush() {
  while (has_unsent()) {
    const ssize_t sent = ::send(socket_.get(), unsent_.data() + unsent_begin_,
                                unsent_.size() - unsent_begin_, MSG_NOSIGNAL | MSG_DONTWAIT);
    if (sent < 0) {
      if (errno == EINTR) continue;
      if (errno == EAGAIN || errno == EWOULDBLOCK || errno == ENOBUFS) return ok();
      return Error{ErrorCode::kWorkerLost, std::string("sending failed: ") + std::strerror(errno)};
    }
    unsent_begin_ += static_cast<size_t>(sent);
  }
  unsent_.clear();
  unsent_begin_ = 0;
  return ok();
}

// Encrypts at most kContentPerWrite bytes into unsent_, which is empty, and sends.
Status SecureSocket::write_records(std::span<const std::byte> content) {
  library_->ERR_clear_error();
  records_of_key_ += (content.size() + kRecordBytes - 1) / kRecordBytes;
  if (records_of_key_ > options_.records_per_key) {
    records_of_key_ = 0;
    (void)library_->SSL_key_update(ssl_, kKeyUpdateNotRequested);
  }
  const int written = library_->SSL_write(ssl_, content.data(), static_cast<int>(content.size()));
  // The BIO takes everything, so that libssl never writes a part.
  if (written != static_cast<int>(content.size())) return failure_of(written, "a record");
  return flush();
}

Result<size_t> SecureSocket::send(std::span<const iovec> pieces) {
  if (!is_established_) return Error{ErrorCode::kProtocol, "encryption: sent before the handshake"};
  const Active here(*this);
  DFLASH_TRY(flush());
  size_t total = 0;
  size_t at = 0;      // the piece that comes next ...
  size_t within = 0;  // ... and how much of it is taken
  const auto rest = [&] {
    return std::span(static_cast<const std::byte*>(pieces[at].iov_base), pieces[at].iov_len)
        .subspan(within);
  };
  const auto skip = [&](size_t num_bytes) {
    within += num_bytes;
    if (within < pieces[at].iov_len) return;
    ++at;
    within = 0;
  };
  while (at < pieces.size() && !has_unsent()) {
    if (rest().size() >= kRecordBytes || at + 1 == pieces.size()) {
      const auto content = rest().first(std::min(rest().size(), kContentPerWrite));
      if (!content.empty()) DFLASH_TRY(write_records(content));
      total += content.size();
      skip(content.size());
      continue;
    }
    // A prefix and the beginning of its message make one record.
    record_.clear();
    while (at < pieces.size() && record_.size() < kRecordBytes) {
      const auto part = rest().first(std::min(rest().size(), kRecordBytes - record_.size()));
      record_.insert(record_.end(), part.begin(), part.end());
      skip(part.size());
    }
    if (!record_.empty()) DFLASH_TRY(write_records(record_));
    total += record_.size();
  }
  return total;
}

Result<size_t> SecureSocket::receive(std::span<const iovec> pieces) {
  if (failure_) return *failure_;
  if (!is_established_)
    return Error{ErrorCode::kProtocol, "encryption: received before the handshake"};
  const Active here(*this);
  may_have_more_ = false;
  size_t total = 0;
  for (const iovec& piece : pieces) {
    size_t filled = 0;
    while (filled < piece.iov_len) {
      // What is left is the kernel's, and the descriptor says so.
      if (total > 0 && received_begin_ == received_end_ && library_->SSL_pending(ssl_) == 0)
        return total;
      library_->ERR_clear_error();
      const size_t room = std::min(piece.iov_len - filled, size_t{1} << 30);
      const int got = library_->SSL_read(ssl_, static_cast<std::byte*>(piece.iov_base) + filled,
                                         static_cast<int>(room));
      if (got > 0) {
        filled += static_cast<size_t>(got);
        total += static_cast<size_t>(got);
        continue;
      }
      if (library_->SSL_get_error(ssl_, got) == kWantRead) return total;
      failure_ = std::make_unique<Error>(failure_of(got, "a record"));
      (void)flush();  // the alert that tells the peer
      if (total == 0) return *failure_;
      may_have_more_ = true;
      return total;
    }
  }
  may_have_more_ = total > 0;
  return total;
}

}  // namespace dflash::transport
