"""Gives the path to workers to a program that is not ours, and watches over both meanwhile.

SPDX-License-Identifier: Apache-2.0
"""
