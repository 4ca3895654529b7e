// One connected socket under TLS 1.3 with an external pre-shared key (RFC 8446 with psk_dhe_ke,
// RFC 9257 for such keys in general). It knows bytes only; what they mean is above. Nothing here
// blocks: every function does what it can now.
//
// Whether there may be something to read is two questions: has the kernel bytes (poll the
// descriptor), or were some taken from it already (`has_pending`)? A sleeper asks both.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <sys/uio.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "base/owned_fd.h"
#include "base/result.h"

namespace dflash::transport {

struct Libssl;

enum class SecureSide : uint8_t { kDialling, kAccepting };

inline constexpr size_t kPskBytes = 32;
// Every record of TLS carries at most so many bytes of content.
inline constexpr size_t kRecordBytes = 16 << 10;
inline constexpr size_t kChannelBindingBytes = 32;

struct PresharedKey {
  std::string identity;  // travels in clear and says which key is meant
  std::array<std::byte, kPskBytes> key;
};

struct SecureOptions {
  // A key of AES-128-GCM is good for 2^24.5 records (RFC 8446, section 5.5). Long before that this
  // side moves on to its next key.
  uint64_t records_per_key = uint64_t{1} << 22;
};

// Not thread-safe. One thread uses it at a time.
class SecureSocket {
 public:
  // Takes a connected socket. The dialling side offers `keys[0]`; the accepting side takes any of
  // `keys`. Errors: kUnsupported where libssl is missing, kSystem, kInvalidArgument.
  static Result<std::unique_ptr<SecureSocket>> create(SecureSide side, OwnedFd socket,
                                                      std::vector<PresharedKey> keys,
                                                      const SecureOptions& options = {});
  ~SecureSocket();
  SecureSocket(const SecureSocket&) = delete;
  SecureSocket& operator=(const SecureSocket&) = delete;

  // Goes on with the handshake; true once it is over. Until then the caller waits for POLLIN, and
  // for POLLOUT while has_unsent(). Errors: kProtocol naming what the ends do not share,
  // kWorkerLost on hang-up. After an error the connection is of no use.
  Result<bool> handshake();
  // Which of the keys both ends have proved to know.
  const std::string& identity() const { return identity_; }
  // A value that only the two ends of this very connection know (RFC 9266, tls-exporter): whoever
  // proves it above cannot be relayed. Errors: kProtocol before the handshake is over.
  Result<std::array<std::byte, kChannelBindingBytes>> channel_binding() const;

  // Encrypts and sends as much of `pieces`, in their order, as the kernel takes now. Returns the
  // bytes taken, 0 where it takes none; what is taken leaves with later calls at the latest.
  // Errors: kWorkerLost.
  Result<size_t> send(std::span<const iovec> pieces);
  // Sends what was encrypted before and the kernel had no room for. Errors: kWorkerLost.
  Status flush();
  bool has_unsent() const { return unsent_begin_ < unsent_.size(); }

  // Fills `pieces` in their order with what has come. Returns the bytes, 0 where there are none
  // now. Errors: kWorkerLost on hang-up; kProtocol where a record was not made by the peer, whose
  // bytes are then never given out.
  Result<size_t> receive(std::span<const iovec> pieces);
  // Whether receive() may return bytes although the descriptor is not readable.
  bool has_pending() const { return may_have_more_; }

  int fd() const { return socket_.get(); }

 private:
  struct Callbacks;
  // The socket on whose behalf libssl runs on this thread: its callbacks are given no pointer to
  // it. Set for the time of one call into libssl, and never read outside of it.
  static thread_local SecureSocket* active_;
  class Active {
   public:
    explicit Active(SecureSocket& self) : before_(active_) { active_ = &self; }
    ~Active() { active_ = before_; }
    Active(const Active&) = delete;
    Active& operator=(const Active&) = delete;

   private:
    SecureSocket* const before_;
  };
  SecureSocket(std::shared_ptr<const Libssl> library, SecureSide side, OwnedFd socket,
               std::vector<PresharedKey> keys, const SecureOptions& options);
  Status open();
  bool fetch();
  Error failure_of(int returned, const char* doing);
  Status write_records(std::span<const std::byte> content);

  const std::shared_ptr<const Libssl> library_;
  const SecureSide side_;
  const OwnedFd socket_;
  const std::vector<PresharedKey> keys_;
  const SecureOptions options_;
  // Of libssl, in the order in which they are made; freed in the other.
  struct ssl_ctx_st* context_ = nullptr;
  struct bio_method_st* method_ = nullptr;
  struct ssl_st* ssl_ = nullptr;

  std::string identity_;  // the key that is used
  std::string claimed_;   // what the peer asked for, for messages
  bool is_established_ = false;
  uint64_t records_of_key_ = 0;

  // Ciphertext on its way out; sent up to unsent_begin_. At most one write of send() is in it.
  std::vector<std::byte> unsent_;
  size_t unsent_begin_ = 0;
  std::vector<std::byte> record_;  // content of one record that several pieces make up

  // Ciphertext that the kernel gave and libssl has not taken.
  std::vector<std::byte> received_;
  size_t received_begin_ = 0, received_end_ = 0;
  bool may_have_more_ = false;
  bool has_hung_up_ = false;
  bool is_peer_plain_ = false;  // the answer to the first flight was no TLS
  bool has_heard_ = false;
  int system_errno_ = 0;
  std::unique_ptr<Error> failure_;  // told once the bytes before it were given out
};

}  // namespace dflash::transport
