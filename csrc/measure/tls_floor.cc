// The floor of encrypted connections: libssl on a blocking socket, without frames, slots, checks or
// buffers of ours.
// SPDX-License-Identifier: Apache-2.0
#include <dlfcn.h>

#include <array>
#include <string>

#include "measure/floor_pipe.h"
#include "transport/secure/libssl.h"

namespace dflash::measure {
namespace {

using transport::Libssl;

// Numbers of OpenSSL's interface, from its manual pages.
constexpr int kTls13 = 0x0304;
constexpr int kSetMinVersion = 123;
constexpr int kSetMaxVersion = 124;
constexpr unsigned char kSuite[2] = {0x13, 0x01};  // TLS_AES_128_GCM_SHA256
constexpr std::array<unsigned char, 32> kKey = {1};
constexpr unsigned char kIdentity[] = "floor";
constexpr size_t kMostBytesPerCall = size_t{1} << 30;

// libssl gives its callbacks no pointer of ours. The library stays in the process once it is found.
const Libssl* library_of_callbacks = nullptr;

ssl_session_st* session_of(ssl_st* ssl) {
  const Libssl& library = *library_of_callbacks;
  ssl_session_st* const session = library.SSL_SESSION_new();
  if (session == nullptr) return nullptr;
  if (library.SSL_SESSION_set1_master_key(session, kKey.data(), kKey.size()) == 1 &&
      library.SSL_SESSION_set_cipher(session, library.SSL_CIPHER_find(ssl, kSuite)) == 1 &&
      library.SSL_SESSION_set_protocol_version(session, kTls13) == 1)
    return session;
  library.SSL_SESSION_free(session);
  return nullptr;
}

int use_psk(ssl_st* ssl, const void*, const unsigned char** identity, size_t* identity_bytes,
            ssl_session_st** session) {
  *identity = kIdentity;
  *identity_bytes = sizeof kIdentity - 1;
  *session = session_of(ssl);
  return *session == nullptr ? 0 : 1;
}

int find_psk(ssl_st* ssl, const unsigned char*, size_t, ssl_session_st** session) {
  *session = session_of(ssl);
  return *session == nullptr ? 0 : 1;
}

class TlsPipe final : public Pipe {
 public:
  explicit TlsPipe(std::shared_ptr<const Libssl> library) : library_(std::move(library)) {}
  ~TlsPipe() override {
    if (ssl_ != nullptr) library_->SSL_free(ssl_);
    if (context_ != nullptr) library_->SSL_CTX_free(context_);
  }

  Status open(int socket, bool is_dialling) {
    void* const handle = ::dlopen(transport::kLibsslName, RTLD_NOW | RTLD_LOCAL | RTLD_NODELETE);
    const auto set_socket =
        handle == nullptr ? nullptr
                          : reinterpret_cast<int (*)(ssl_st*, int)>(::dlsym(handle, "SSL_set_fd"));
    context_ = library_->SSL_CTX_new(library_->TLS_method());
    if (set_socket == nullptr || context_ == nullptr) return failed("making a connection");
    library_->SSL_CTX_ctrl(context_, kSetMinVersion, kTls13, nullptr);
    library_->SSL_CTX_ctrl(context_, kSetMaxVersion, kTls13, nullptr);
    library_->SSL_CTX_set_ciphersuites(context_, "TLS_AES_128_GCM_SHA256");
    library_->SSL_CTX_set_num_tickets(context_, 0);
    library_->SSL_CTX_set_psk_use_session_callback(context_, &use_psk);
    library_->SSL_CTX_set_psk_find_session_callback(context_, &find_psk);
    ssl_ = library_->SSL_new(context_);
    if (ssl_ == nullptr || set_socket(ssl_, socket) != 1) return failed("making a connection");
    if (is_dialling) {
      library_->SSL_set_connect_state(ssl_);
    } else {
      library_->SSL_set_accept_state(ssl_);
    }
    return ok();
  }

  Status send(std::span<const std::byte> payload) override {
    while (!payload.empty()) {
      const int taken = library_->SSL_write(ssl_, payload.data(), at_once(payload.size()));
      if (taken <= 0) return failed("sending");
      payload = payload.subspan(static_cast<size_t>(taken));
    }
    return ok();
  }

  Result<std::span<const std::byte>> receive(std::span<std::byte> private_memory) override {
    for (std::span<std::byte> left = private_memory; !left.empty();) {
      const int got = library_->SSL_read(ssl_, left.data(), at_once(left.size()));
      if (got <= 0) return failed("receiving");
      left = left.subspan(static_cast<size_t>(got));
    }
    return std::span<const std::byte>(private_memory);
  }

 private:
  static int at_once(size_t num_bytes) {
    return static_cast<int>(num_bytes < kMostBytesPerCall ? num_bytes : kMostBytesPerCall);
  }

  Error failed(const char* doing) const {
    const char* const reason = library_->ERR_reason_error_string(library_->ERR_get_error());
    return {ErrorCode::kSystem, std::string("floor: libssl: ") + doing + ": " +
                                    (reason != nullptr ? reason : "no answer, or a cut")};
  }

  const std::shared_ptr<const Libssl> library_;
  ssl_ctx_st* context_ = nullptr;
  ssl_st* ssl_ = nullptr;
};

}  // namespace

Result<std::unique_ptr<Pipe>> make_tls_pipe(int socket, bool is_dialling) {
  auto found = transport::load_libssl();
  if (!found.ok()) return std::move(found).error();
  // Kept for the callbacks, and equal for every pipe.
  static const std::shared_ptr<const Libssl> kept = found.value();
  library_of_callbacks = kept.get();
  auto pipe = std::make_unique<TlsPipe>(std::move(found).value());
  DFLASH_TRY(pipe->open(socket, is_dialling));
  return std::unique_ptr<Pipe>(std::move(pipe));
}

}  // namespace dflash::measure
