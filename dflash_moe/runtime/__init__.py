"""The host's side: starts and reaches workers, plans data paths, and offers `ExpertRuntime` to
everything above.

SPDX-License-Identifier: Apache-2.0
"""
