/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The threaded engine over RDMA, on the stub: see engine_threads.h. With ISW_TEST_RDMA_HOST on this
 * host's own devices, from that address of its to itself.
 *
 *     test_rdma_engine [MILLISECONDS [SEED]]
 */
#include "engine_threads.h"
#include "verbs_stub.h"

int main(int argc, char **argv)
{
	const char *address = getenv("ISW_TEST_RDMA_HOST");
	int code;

	if (address) {
		host = address;
		verbs = &iswi_verbs_system;
		return conform(argc, argv);
	}
	stub_start();
	stub.delay_us = 20;
	verbs = &stub_verbs;
	code = conform(argc, argv);
	CHECK(stub.transfers && stub.staged);
	stub_stop();
	return code;
}
