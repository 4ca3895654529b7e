"""What our plug-ins use of other engines, as tables: they are compared with the source in a wheel.

SPDX-License-Identifier: Apache-2.0
"""
