// What marks the functions that a plug-in exports; everything else stays its own.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#define DFLASH_PLUGIN_EXPORT extern "C" __attribute__((visibility("default")))
