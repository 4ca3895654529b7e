// Making an encrypted connection: what libssl is told, how it asks for keys and bytes, and the
// handshake with what went wrong in it.
// SPDX-License-Identifier: Apache-2.0
#include <sys/socket.h>

#include <algorithm>
#include <cstring>

#include "transport/secure/libssl.h"
#include "transport/secure/secure_socket.h"

namespace dflash::transport {
namespace {

// Numbers of OpenSSL's interface, from its manual pages.
constexpr int kTls13 = 0x0304;
constexpr int kSetMinVersion = 123;
constexpr int kSetMaxVersion = 124;
constexpr int kVerifyPeer = 1;
constexpr int kBioTypeSourceSink = 0x0400;
constexpr int kBioFlush = 11;
constexpr int kBioRetryRead = 0x01 | 0x08;
constexpr int kBioFlags = 0x0f;
constexpr int kWantRead = 2;
constexpr int kZeroReturn = 6;
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
constexpr size_t kLongestClaim = 80;
constexpr size_t kReceiveBytes = 64 << 10;

std::string printable(const unsigned char* bytes, size_t num_bytes) {
  std::string text;
  for (size_t i = 0; i < std::min(num_bytes, kLongestClaim); ++i)
    text += bytes[i] >= 0x20 && bytes[i] < 0x7f ? static_cast<char>(bytes[i]) : '?';
  return text;
}

}  // namespace

thread_local SecureSocket* SecureSocket::active_ = nullptr;

// What libssl calls while it runs, on this thread.
struct SecureSocket::Callbacks {
  static int write(bio_st*, const char* bytes, int num_bytes) {
    SecureSocket& self = *active_;
    const auto* const begin = reinterpret_cast<const std::byte*>(bytes);
    self.unsent_.insert(self.unsent_.end(), begin, begin + num_bytes);
    return num_bytes;
  }

  static int read(bio_st* bio, char* bytes, int num_bytes) {
    SecureSocket& self = *active_;
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
    SecureSocket& self = *active_;
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
    SecureSocket& self = *active_;
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
  received_.resize(kReceiveBytes);
  return ok();
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

}  // namespace dflash::transport
