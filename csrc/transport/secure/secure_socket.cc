// Drives libssl over a BIO of our own: ciphertext passes through two buffers, so that many records
// take one system call, and libssl itself never meets the socket (its own BIO would raise SIGPIPE).
// SPDX-License-Identifier: Apache-2.0
#include "transport/secure/secure_socket.h"

#include <poll.h>
#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

#include "transport/secure/libssl.h"

namespace dflash::transport {
namespace {

// Numbers of OpenSSL's interface, from its manual pages.
constexpr int kTls13 = 0x0304;
constexpr int kSetMinVersion = 123;
constexpr int kSetMaxVersion = 124;
constexpr int kVerifyPeer = 1;
constexpr int kErrorSsl = 1;
constexpr int kWantRead = 2;
constexpr int kZeroReturn = 6;
constexpr int kKeyUpdateNotRequested = 0;
constexpr int kBioTypeSourceSink = 0x0400;
constexpr int kBioFlush = 11;
constexpr int kBioRetryRead = 0x01 | 0x08;
constexpr int kBioFlags = 0x0f;
// Reasons of errors are the low bits; alerts of the peer begin at 1000.
constexpr unsigned long kReasonMask = 0x7fffff;
constexpr unsigned long kAlertHandshakeFailure = 1040;
constexpr unsigned long kAlertIllegalParameter = 1047;
constexpr unsigned long kAlertDecryptError = 1051;
constexpr unsigned long kBadRecordMac = 281;

// Both suites hash with SHA-256, for which the keys are made. The second is for processors without
// AES instructions.
constexpr const char* kSuites = "TLS_AES_128_GCM_SHA256:TLS_CHACHA20_POLY1305_SHA256";
constexpr unsigned char kPskSuite[2] = {0x13, 0x01};
constexpr char kBindingLabel[] = "EXPORTER-Channel-Binding";  // RFC 9266, section 2

// So much content goes to libssl at once: enough that one system call carries it, and little
// enough that its ciphertext is still in the cache then.
constexpr size_t kContentPerWrite = 4 * kRecordBytes;
constexpr size_t kReceiveBytes = 64 << 10;
// A content type, a tag, a header: 22 bytes for each record (RFC 8446, section 5.2).
constexpr size_t kWriteBytes = kContentPerWrite + 5 * 22;
constexpr size_t kLongestClaim = 80;

std::string printable(const unsigned char* bytes, size_t num_bytes) {
  std::string text;
  for (size_t i = 0; i < std::min(num_bytes, kLongestClaim); ++i)
    text += bytes[i] >= 0x20 && bytes[i] < 0x7f ? static_cast<char>(bytes[i]) : '?';
  return text;
}

// Whether these first bytes can be TLS: a type from change_cipher_spec to application_data, then
// version 3.1 to 3.4 (RFC 8446, section 5.1). The third byte of a frame of the plain protocol, whose
// length has 17 bits, is 0 or belongs to a frame whose first byte is 0.
bool begins_record(std::span<const std::byte> bytes) {
  const auto at = [&](size_t i) { return std::to_integer<unsigned>(bytes[i]); };
  if (at(0) < 0x14 || at(0) > 0x17) return false;
  if (bytes.size() > 1 && at(1) != 3) return false;
  return bytes.size() < 3 || (at(2) >= 1 && at(2) <= 4);
}

// The socket on whose behalf libssl runs on this thread: its callbacks cannot be given a pointer
// without another dozen of functions. Set for the time of one call into libssl, and never read
// outside of it.
thread_local SecureSocket* active = nullptr;

class Active {
 public:
  explicit Active(SecureSocket& self) : before_(active) { active = &self; }
  ~Active() { active = before_; }
  Active(const Active&) = delete;
  Active& operator=(const Active&) = delete;

 private:
  SecureSocket* const before_;
};

}  // namespace

// What libssl calls while it runs, on this thread.
struct SecureSocket::Callbacks {
  static int write(bio_st*, const char* bytes, int num_bytes) {
    SecureSocket& self = *active;
    const auto* const begin = reinterpret_cast<const std::byte*>(bytes);
    self.unsent_.insert(self.unsent_.end(), begin, begin + num_bytes);
    return num_bytes;
  }

  static int read(bio_st* bio, char* bytes, int num_bytes) {
    SecureSocket& self = *active;
    const Libssl& library = *self.library_;
    library.BIO_clear_flags(bio, kBioFlags);
    if (self.received_begin_ == self.received_end_ && !self.fetch()) {
      if (!self.has_hung_up_ && self.system_errno_ == 0) library.BIO_set_flags(bio, kBioRetryRead);
      return self.has_hung_up_ ? 0 : -1;
    }
    const size_t taken =
        std::min(static_cast<size_t>(num_bytes), self.received_end_ - self.received_begin_);
    std::memcpy(bytes, self.received_.data() + self.received_begin_, taken);
    self.received_begin_ += taken;
    return static_cast<int>(taken);
  }

  // libssl flushes after each flight; send() and handshake() do that for many records at once.
  static long control(bio_st*, int command, long, void*) { return command == kBioFlush ? 1 : 0; }

  // Makes the session that stands for a pre-shared key, which libssl then owns. Null where memory
  // is out.
  static ssl_session_st* session_of(const Libssl& library, ssl_st* ssl, const PresharedKey& key) {
    const ssl_cipher_st* const suite = library.SSL_CIPHER_find(ssl, kPskSuite);
    ssl_session_st* const session = suite == nullptr ? nullptr : library.SSL_SESSION_new();
    if (session == nullptr) return nullptr;
    const auto* const bytes = reinterpret_cast<const unsigned char*>(key.key.data());
    const bool is_made = library.SSL_SESSION_set1_master_key(session, bytes, key.key.size()) == 1 &&
                         library.SSL_SESSION_set_cipher(session, suite) == 1 &&
                         library.SSL_SESSION_set_protocol_version(session, kTls13) == 1;
    if (is_made) return session;
    library.SSL_SESSION_free(session);
    return nullptr;
  }

  static int use_psk(ssl_st* ssl, const void*, const unsigned char** identity,
                     size_t* identity_bytes, ssl_session_st** session) {
    SecureSocket& self = *active;
    const PresharedKey& key = self.keys_[0];
    *session = session_of(*self.library_, ssl, key);
    if (*session == nullptr) return 0;
    self.identity_ = key.identity;
    *identity = reinterpret_cast<const unsigned char*>(key.identity.data());
    *identity_bytes = key.identity.size();
    return 1;
  }

  static int find_psk(ssl_st* ssl, const unsigned char* identity, size_t identity_bytes,
                      ssl_session_st** session) {
    SecureSocket& self = *active;
    *session = nullptr;
    self.claimed_ = printable(identity, identity_bytes);
    for (const PresharedKey& key : self.keys_) {
      if (key.identity.size() != identity_bytes ||
          std::memcmp(key.identity.data(), identity, identity_bytes) != 0)
        continue;
      *session = session_of(*self.library_, ssl, key);
      self.identity_ = key.identity;
      return *session == nullptr ? 0 : 1;
    }
    return 1;  // no key: without a certificate either, libssl then refuses the handshake
  }
};

Result<std::unique_ptr<SecureSocket>> SecureSocket::create(SecureSide side, OwnedFd socket,
                                                           std::vector<PresharedKey> keys,
                                                           const SecureOptions& options) {
  if (!socket.is_open() || keys.empty() || options.records_per_key == 0) {
    return Error{ErrorCode::kInvalidArgument,
                 "an encrypted connection needs a connected socket and at least one key"};
  }
  auto library = load_libssl();
  if (!library.ok()) return std::move(library).error();
  std::unique_ptr<SecureSocket> made(new SecureSocket(std::move(library).value(), side,
                                                      std::move(socket), std::move(keys), options));
  DFLASH_TRY(made->open());
  return made;
}

SecureSocket::SecureSocket(std::shared_ptr<const Libssl> library, SecureSide side, OwnedFd socket,
                           std::vector<PresharedKey> keys, const SecureOptions& options)
    : library_(std::move(library)),
      side_(side),
      socket_(std::move(socket)),
      keys_(std::move(keys)),
      options_(options) {}

SecureSocket::~SecureSocket() {
  const Active here(*this);
  // No parting record: whatever has a length of its own above notices a cut, and a forked child
  // that ends must not speak for its parent.
  if (ssl_ != nullptr) library_->SSL_free(ssl_);
  if (context_ != nullptr) library_->SSL_CTX_free(context_);
  if (method_ != nullptr) library_->BIO_meth_free(method_);
}

Status SecureSocket::open() {
  const Libssl& library = *library_;
  const Active here(*this);
  library.ERR_clear_error();
  const auto failed = [] {
    return Error{ErrorCode::kSystem, "libssl cannot make an encrypted connection"};
  };
  context_ = library.SSL_CTX_new(library.TLS_method());
  if (context_ == nullptr) return failed();
  const bool is_configured = library.SSL_CTX_ctrl(context_, kSetMinVersion, kTls13, nullptr) == 1 &&
                             library.SSL_CTX_ctrl(context_, kSetMaxVersion, kTls13, nullptr) == 1 &&
                             library.SSL_CTX_set_ciphersuites(context_, kSuites) == 1 &&
                             // A session is never resumed: each connection proves the key again.
                             library.SSL_CTX_set_num_tickets(context_, 0) == 1;
  if (!is_configured) return failed();
  if (side_ == SecureSide::kDialling) {
    // No certificate is trusted, so that a peer which offers one instead of the key is refused. The
    // accepting side has none to offer and asks for none.
    library.SSL_CTX_set_verify(context_, kVerifyPeer, nullptr);
    library.SSL_CTX_set_psk_use_session_callback(context_, &Callbacks::use_psk);
  } else {
    library.SSL_CTX_set_psk_find_session_callback(context_, &Callbacks::find_psk);
  }
  ssl_ = library.SSL_new(context_);
  method_ = library.BIO_meth_new(kBioTypeSourceSink, "dflash_moe");
  if (ssl_ == nullptr || method_ == nullptr) return failed();
  library.BIO_meth_set_write(method_, &Callbacks::write);
  library.BIO_meth_set_read(method_, &Callbacks::read);
  library.BIO_meth_set_ctrl(method_, &Callbacks::control);
  bio_st* const bio = library.BIO_new(method_);
  if (bio == nullptr) return failed();
  library.BIO_set_init(bio, 1);
  library.SSL_set_bio(ssl_, bio, bio);  // `ssl_` owns it now
  if (side_ == SecureSide::kDialling) {
    library.SSL_set_connect_state(ssl_);
  } else {
    library.SSL_set_accept_state(ssl_);
  }
  unsent_.reserve(kWriteBytes);
  record_.reserve(kRecordBytes);
  received_.resize(kReceiveBytes);
  return ok();
}

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
  if (!has_heard_ && !begins_record(std::span(received_).first(received_end_))) is_peer_plain_ = true;
  has_heard_ = true;
  return true;
}

Result<bool> SecureSocket::handshake() {
  if (is_established_) return true;
  const Active here(*this);
  library_->ERR_clear_error();
  const int done = library_->SSL_do_handshake(ssl_);
  if (done == 1 && library_->SSL_session_reused(ssl_) != 1) {
    return Error{ErrorCode::kProtocol, "encryption: the handshake did not use the shared key"};
  }
  if (done != 1 && library_->SSL_get_error(ssl_, done) != kWantRead) {
    Error failed = failure_of(done, "the handshake");
    (void)flush();  // the alert that tells the peer
    return failed;
  }
  DFLASH_TRY(flush());
  is_established_ = done == 1 && !has_unsent();
  may_have_more_ = is_established_ && received_begin_ < received_end_;
  return is_established_;
}

// Says why libssl returned `returned`, which was not for want of bytes.
Error SecureSocket::failure_of(int returned, const char* doing) {
  const std::string what = std::string("encryption: ") + doing;
  if (is_peer_plain_) {
    return {ErrorCode::kProtocol,
            what + " failed: the peer answered without TLS; set ipc.encryption alike at both ends"};
  }
  if (library_->SSL_get_error(ssl_, returned) == kZeroReturn || has_hung_up_)
    return {ErrorCode::kWorkerLost, "the peer hung up"};
  if (system_errno_ != 0)
    return {ErrorCode::kWorkerLost,
            std::string("receiving failed: ") + std::strerror(system_errno_)};
  const unsigned long error = library_->ERR_get_error();
  const char* const reason = library_->ERR_reason_error_string(error);
  std::string text = what + " failed: " + (reason != nullptr ? reason : "for no stated reason");
  switch (error & kReasonMask) {
    case kAlertHandshakeFailure:
      text +=
          "; the peer does not take this role and worker name: check the worker's name at both "
          "ends";
      break;
    case kAlertDecryptError:
    case kAlertIllegalParameter:
      text += "; the peer has another key: check the key file on both ends";
      break;
    case kBadRecordMac: text += "; it was changed on its way"; break;
    default:
      if (!is_established_ && !claimed_.empty() && identity_.empty())
        text += "; the peer asked for \"" + claimed_ + "\", which is not this worker's";
      else if (!is_established_ && !claimed_.empty())
        text += "; the peer of \"" + claimed_ + "\" has another key";
  }
  return {ErrorCode::kProtocol, text};
}

Result<std::array<std::byte, kChannelBindingBytes>> SecureSocket::channel_binding() const {
  std::array<std::byte, kChannelBindingBytes> binding{};
  const int exported =
      is_established_ ? library_->SSL_export_keying_material(
                            ssl_, reinterpret_cast<unsigned char*>(binding.data()), binding.size(),
                            kBindingLabel, sizeof kBindingLabel - 1, nullptr, 0, 0)
                      : 0;
  if (exported == 1) return binding;
  return Error{ErrorCode::kProtocol, "encryption: no channel binding before the handshake is over"};
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
