// The functions of OpenSSL's libssl that encrypted connections use, found at run time: the package
// neither needs OpenSSL to be built nor to be installed, and machines without it are told so in
// words. The declarations follow OpenSSL 3's manual pages; its types stay opaque here.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>

#include "base/result.h"

struct ssl_st;
struct ssl_ctx_st;
struct ssl_method_st;
struct ssl_session_st;
struct ssl_cipher_st;
struct bio_st;
struct bio_method_st;

namespace dflash::transport {

// The one major version whose interface is used. Another one may differ in any function.
inline constexpr const char* kLibsslName = "libssl.so.3";

// The callbacks by which libssl asks for a pre-shared key: the dialling side's and the accepting
// side's.
using UsePskCallback = int (*)(ssl_st*, const void* hash, const unsigned char** identity,
                               size_t* identity_bytes, ssl_session_st** session);
using FindPskCallback = int (*)(ssl_st*, const unsigned char* identity, size_t identity_bytes,
                                ssl_session_st** session);
using BioWrite = int (*)(bio_st*, const char* bytes, int num_bytes);
using BioRead = int (*)(bio_st*, char* bytes, int num_bytes);
using BioControl = long (*)(bio_st*, int command, long number, void* pointer);

// One row per function, so that a missing one is named and none is left unset: result, name,
// parameters.
#define DFLASH_LIBSSL_FUNCTIONS(X)                                                               \
  X(unsigned long, OpenSSL_version_num, (void))                                                  \
  X(const char*, OpenSSL_version, (int which))                                                   \
  X(const ssl_method_st*, TLS_method, (void))                                                    \
  X(ssl_ctx_st*, SSL_CTX_new, (const ssl_method_st*))                                            \
  X(void, SSL_CTX_free, (ssl_ctx_st*))                                                           \
  X(long, SSL_CTX_ctrl, (ssl_ctx_st*, int command, long number, void* pointer))                  \
  X(int, SSL_CTX_set_ciphersuites, (ssl_ctx_st*, const char* names))                             \
  X(int, SSL_CTX_set_num_tickets, (ssl_ctx_st*, size_t count))                                   \
  X(void, SSL_CTX_set_verify, (ssl_ctx_st*, int mode, void* callback))                           \
  X(void, SSL_CTX_set_psk_use_session_callback, (ssl_ctx_st*, UsePskCallback))                   \
  X(void, SSL_CTX_set_psk_find_session_callback, (ssl_ctx_st*, FindPskCallback))                 \
  X(ssl_st*, SSL_new, (ssl_ctx_st*))                                                             \
  X(void, SSL_free, (ssl_st*))                                                                   \
  X(void, SSL_set_bio, (ssl_st*, bio_st * read, bio_st * write))                                 \
  X(void, SSL_set_connect_state, (ssl_st*))                                                      \
  X(void, SSL_set_accept_state, (ssl_st*))                                                       \
  X(int, SSL_do_handshake, (ssl_st*))                                                            \
  X(int, SSL_read, (ssl_st*, void* bytes, int num_bytes))                                        \
  X(int, SSL_write, (ssl_st*, const void* bytes, int num_bytes))                                 \
  X(int, SSL_pending, (const ssl_st*))                                                           \
  X(int, SSL_get_error, (const ssl_st*, int returned))                                           \
  X(int, SSL_session_reused, (const ssl_st*))                                                    \
  X(int, SSL_key_update, (ssl_st*, int kind))                                                    \
  X(int, SSL_export_keying_material,                                                             \
    (ssl_st*, unsigned char* out, size_t out_bytes, const char* label, size_t label_bytes,       \
     const unsigned char* context, size_t context_bytes, int use_context))                       \
  X(const ssl_cipher_st*, SSL_CIPHER_find, (ssl_st*, const unsigned char* id))                   \
  X(ssl_session_st*, SSL_SESSION_new, (void))                                                    \
  X(void, SSL_SESSION_free, (ssl_session_st*))                                                   \
  X(int, SSL_SESSION_set1_master_key, (ssl_session_st*, const unsigned char* key, size_t bytes)) \
  X(int, SSL_SESSION_set_cipher, (ssl_session_st*, const ssl_cipher_st*))                        \
  X(int, SSL_SESSION_set_protocol_version, (ssl_session_st*, int version))                       \
  X(bio_method_st*, BIO_meth_new, (int type, const char* name))                                  \
  X(void, BIO_meth_free, (bio_method_st*))                                                       \
  X(int, BIO_meth_set_write, (bio_method_st*, BioWrite))                                         \
  X(int, BIO_meth_set_read, (bio_method_st*, BioRead))                                           \
  X(int, BIO_meth_set_ctrl, (bio_method_st*, BioControl))                                        \
  X(bio_st*, BIO_new, (const bio_method_st*))                                                    \
  X(void, BIO_set_init, (bio_st*, int is_ready))                                                 \
  X(void, BIO_set_flags, (bio_st*, int flags))                                                   \
  X(void, BIO_clear_flags, (bio_st*, int flags))                                                 \
  X(unsigned long, ERR_get_error, (void))                                                        \
  X(void, ERR_clear_error, (void))                                                               \
  X(const char*, ERR_reason_error_string, (unsigned long error))

struct Libssl {
#define DFLASH_DECLARE(result, name, parameters) result(*name) parameters = nullptr;
  DFLASH_LIBSSL_FUNCTIONS(DFLASH_DECLARE)
#undef DFLASH_DECLARE

  // Such as "OpenSSL 3.0.19 27 Jan 2026".
  std::string version() const { return OpenSSL_version(0); }
};

// Opens the library, which then stays in the process, and finds every function. A second call is
// answered from what the loader has; it takes some microseconds. Tests name another file.
//
// Errors: kUnsupported, which names the package to install and, where another major version is
// there, that version.
Result<std::shared_ptr<const Libssl>> load_libssl(const char* name = kLibsslName);

}  // namespace dflash::transport
