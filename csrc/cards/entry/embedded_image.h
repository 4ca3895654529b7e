// The bytes of a file as a symbol of this library, put there by the assembler.
// SPDX-License-Identifier: Apache-2.0
#pragma once

// DFLASH_EMBED(symbol, "path"): `symbol` is the first byte. Page-aligned: drivers read images as
// ELF files.
#define DFLASH_EMBED(symbol, path)                                                                \
  __asm__(".pushsection .rodata\n.balign 4096\n.hidden " #symbol "\n.globl " #symbol "\n" #symbol \
          ":\n.incbin \"" path "\"\n.byte 0\n.balign 16\n.popsection\n");                         \
  extern "C" const unsigned char symbol[];
