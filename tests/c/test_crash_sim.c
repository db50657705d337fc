/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The same simulation in a build of the engine that may end behind every store to the state file.
 * CMake links it with that: whatever is named test_crash_*.
 */
#include "test_engine_sim.c"
