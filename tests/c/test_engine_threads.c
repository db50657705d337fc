/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The threaded engine over TCP: see engine_threads.h.
 *
 *     test_engine_threads [MILLISECONDS [SEED]]
 */
#include "engine_threads.h"

int main(int argc, char **argv)
{
	return conform(argc, argv);
}
