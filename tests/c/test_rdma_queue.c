/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The RDMA transport at work: right bytes, bounded, in order. On the stub, or, with
 * ISW_TEST_RDMA_HOST, on this host's own devices.
 */
#include "rdma_fixture.h"

#define MANY    300u
#define WRITERS 4u

static void fill(char *page, uint64_t value)
{
	for (uint32_t i = 0; i < ISW_PAGE_BYTES; i += 8)
		memcpy(page + i, &value, 8);
}

static bool is_filled(const char *page, uint64_t value)
{
	for (uint32_t i = 0; i < ISW_PAGE_BYTES; i += 8)
		if (memcmp(page + i, &value, 8) != 0)
			return false;
	return true;
}

/* From staging that is registered, and from memory that is not. */
RIG_TEST(test_pages_go_there_and_back)
{
	char *own = rig_pages(2 * ISW_PAGE_BYTES);
	uint64_t staged;

	staged = stub.staged;
	for (uint32_t i = 0; i < 2; i++) {
		char *from = i == 0 ? rig.staging + 3 * ISW_PAGE_BYTES : own;

		fill(from, 100 + i);
		CHECK_EQ(rig_do(ISWI_XFER_WRITE, i, 7, from), 0);
		CHECK(is_filled(rig.memory + rig_offset(i, 7), 100 + i));
		CHECK_EQ(rig_do(ISWI_XFER_READ, i, 7, own + ISW_PAGE_BYTES), 0);
		CHECK(is_filled(own + ISW_PAGE_BYTES, 100 + i));
	}
	/* What is registered is not copied first. */
	if (rig_on_stub())
		CHECK_EQ(stub.staged - staged, 1);
	free(own);
}

/* Many more than fit, as one chain; few completions are asked for. */
RIG_TEST(test_a_long_chain_waits_its_turn, .depth = 32)
{
	static struct op ops[MANY];
	char *memory = rig_pages(MANY * ISW_PAGE_BYTES);
	uint64_t completions;

	completions = stub.completions;
	for (uint32_t round = 0; round < 2; round++) {
		for (uint32_t i = 0; i < MANY; i++) {
			char *page = memory + i * ISW_PAGE_BYTES;

			if (round == 0)
				fill(page, i);
			else
				memset(page, 0xee, ISW_PAGE_BYTES);
			rig_op(&ops[i], round ? ISWI_XFER_READ : ISWI_XFER_WRITE, 1, i, page);
		}
		ops_submit(ops, MANY);
		ops_await(ops, MANY, 0);
		for (uint32_t i = 0; i < MANY; i++)
			CHECK(is_filled(memory + i * ISW_PAGE_BYTES, i));
	}
	if (rig_on_stub())
		CHECK(stub.completions - completions < MANY);
	free(memory);
}

/* Of 1 MiB each: two fill the connection's own memory, in any order of sizes before them. */
RIG_TEST(test_large_reads_share_the_bounce_memory, .depth = 64)
{
	enum { READS = 24 };
	static const uint32_t pages[] = {256, 1, 255, 256, 17, 256};
	static struct op ops[READS];
	char *memory = rig_pages(READS * (1u << 20));

	for (uint32_t i = 0; i < RIG_SLAB_PAGES; i++)
		fill(rig.memory + i * ISW_PAGE_BYTES, i);
	for (uint32_t i = 0; i < READS; i++) {
		op_start(&ops[i], &rig.client, ISWI_XFER_READ, i * ISW_PAGE_BYTES,
			 memory + i * (1u << 20),
			 pages[i % ISWI_ARRAY_LEN(pages)] * ISW_PAGE_BYTES);
	}
	ops_await(ops, READS, 0);
	for (uint32_t i = 0; i < READS; i++)
		for (uint32_t p = 0; p < ops[i].xfer.length / ISW_PAGE_BYTES; p++)
			CHECK(is_filled((char *)ops[i].xfer.buf + p * ISW_PAGE_BYTES, i + p));
	free(memory);
}

RIG_TEST(test_what_cannot_be_is_refused_and_the_rest_is_done)
{
	static char page[2 * ISW_PAGE_BYTES];
	const struct {
		int error;
		enum iswi_xfer_kind kind;
		uint64_t offset;
		uint32_t length;
	} cases[] = {
		{-ENXIO, ISWI_XFER_READ, rig_offset(RIG_SLOTS, 0), ISW_PAGE_BYTES}, /* no key */
		{0, ISWI_XFER_WRITE, 0, ISW_PAGE_BYTES},
		{-ENXIO, ISWI_XFER_READ, rig_offset(RIG_SLOTS + 1, 0),
		 ISW_PAGE_BYTES}, /* no slot */
		{-EINVAL, ISWI_XFER_WRITE, rig_offset(1, 0) - ISW_PAGE_BYTES, 2 * ISW_PAGE_BYTES},
		{-EINVAL, ISWI_XFER_READ, 0, 0},
	};
	struct op ops[ISWI_ARRAY_LEN(cases)];

	for (uint32_t i = 0; i < ISWI_ARRAY_LEN(cases); i++)
		op_init(&ops[i], &rig.client, cases[i].kind, cases[i].offset, page,
			cases[i].length);
	ops_submit(ops, ISWI_ARRAY_LEN(cases));
	for (uint32_t i = 0; i < ISWI_ARRAY_LEN(cases); i++)
		ops_await(&ops[i], 1, cases[i].error);
	CHECK_EQ(rig.client.downs, 0);
	CHECK_EQ(iswi_rdma_places_set(rig.places, RIG_SLOTS + 1, &rig.probe_key), -EINVAL);
}

static void *write_and_read(void *arg)
{
	const uint32_t number = (uint32_t)(uintptr_t)arg;
	char *memory = rig_pages(2 * ISW_PAGE_BYTES);

	for (uint32_t i = 0; i < 100; i++) {
		fill(memory, i << 8 | number);
		CHECK_EQ(rig_do(ISWI_XFER_WRITE, number, i % 5, memory), 0);
		CHECK_EQ(rig_do(ISWI_XFER_READ, number, i % 5, memory + ISW_PAGE_BYTES), 0);
		CHECK(is_filled(memory + ISW_PAGE_BYTES, i << 8 | number));
	}
	free(memory);
	return NULL;
}

RIG_TEST(test_many_threads_submit, .depth = 3)
{
	at_once(WRITERS, write_and_read);
}

/* On an idle queue the receiver sleeps: what ends is noticed all the same. */
RIG_TEST(test_an_idle_queue_wakes_up)
{
	static char page[ISW_PAGE_BYTES];

	for (uint32_t i = 0; i < 3; i++) {
		usleep(30000);
		CHECK_EQ(rig_do(ISWI_XFER_READ, 0, 0, page), 0);
	}
}

int main(void)
{
	return run_on_rig(false);
}
