/* SPDX-License-Identifier: Apache-2.0 */
/* The front end far: its rules (csrc/frontend/far.h), with clients that keep to them or do not. */
#include <sched.h>

#include "far_world.h"
#include "frontend/far.h"
#include "tests.h"

TEST(what_was_written_is_read)
{
	struct world w;
	struct far_tester t;

	begin(&w);
	t = connect_far(w.job);
	CHECK_EQ(t.welcome.blocks_max, ISWI_FAR_NUMBERS_MIN);
	fill(&t, WRITER, SECRET);
	CHECK_EQ(far_do(&t, WRITER, ISWF_WRITE, 3, 0, ISWF_BLOCK_PAGES), 0);
	fill(&t, WRITER, SECRET + 1);
	CHECK_EQ(far_do(&t, WRITER, ISWF_WRITE, 3, 100, 7), 0);
	CHECK_EQ(far_do(&t, 0, ISWF_READ, 3, 0, ISWF_BLOCK_PAGES), 0);
	for (uint32_t page = 0; page < ISWF_BLOCK_PAGES; page++)
		CHECK_EQ(word_of(&t, 0, page), page >= 100 && page < 107 ? SECRET + 1 : SECRET);
	CHECK_EQ(far_do(&t, 1, ISWF_READ, 3, 106, 2), 0);
	CHECK_EQ(word_of(&t, 1, 0), SECRET + 1);
	CHECK_EQ(word_of(&t, 1, 1), SECRET);
	CHECK_EQ(far_do(&t, 1, ISWF_CONFIRM, 3, 0, ISWF_BLOCK_PAGES), 0);
	CHECK_EQ(far_do(&t, 1, ISWF_DISCARD, 3, 106, 1), 0);
	CHECK_EQ(far_do(&t, 1, ISWF_READ, 3, 106, 1), 0);
	CHECK_EQ(word_of(&t, 1, 0), 0);
	leave_far(&t);
	finish(&w);
}

/* F18: nothing that no agent asks for is done, or does harm. */
TEST(requests_that_no_agent_makes_are_refused)
{
	static const struct {
		uint32_t slot, op, block, first, pages;
		int code;
	} wrong[] = {
		{0, 7, 0, 0, 1, -EINVAL},
		{0, ISWF_WRITE, 0, 0, 1, -EINVAL},
		{WRITER, ISWF_READ, 1, 0, 1, -EINVAL},
		{WRITER, ISWF_WRITE, ISWI_FAR_NUMBERS_MIN, 0, 1, -EINVAL},
		{WRITER, ISWF_WRITE, UINT32_MAX, 0, 1, -EINVAL},
		{WRITER, ISWF_WRITE, 1, 0, 0, -EINVAL},
		{WRITER, ISWF_WRITE, 1, 511, 2, -EINVAL},
		{WRITER, ISWF_WRITE, 1, UINT32_MAX, 2, -EINVAL},
		{WRITER, ISWF_WRITE, 1, 0, UINT32_MAX, -EINVAL},
		{0, ISWF_READ, 5, 0, 1, -ENOENT},
		{0, ISWF_DISCARD, 5, 0, 512, -ENOENT},
		{0, ISWF_CONFIRM, 5, 0, 1, -ENOENT},
		{WRITER, ISWF_CONFIRM, 1, 0, 1, -EINVAL},
	};
	struct world w;
	struct far_tester t;

	begin(&w);
	t = connect_far(w.job);
	for (size_t i = 0; i < ISWI_ARRAY_LEN(wrong); i++)
		CHECK_EQ(far_do(&t, wrong[i].slot, wrong[i].op, wrong[i].block, wrong[i].first,
				wrong[i].pages),
			 wrong[i].code);
	CHECK_EQ(used(&w), 0);
	leave_far(&t);
	finish(&w);
}

TEST(a_full_range_is_an_answer)
{
	struct world w;
	struct far_tester t;

	begin(&w);
	t = connect_far(w.job);
	for (uint32_t i = 0; i < FAR_BLOCKS; i++)
		CHECK_EQ(far_do(&t, WRITER, ISWF_WRITE, i, 0, 1), 0);
	leave_far(&t);
	t = connect_far(w.job); /* another process, as far as the front end knows: our former end */
	wait_used(&w, 0);
	for (uint32_t i = 0; i < FAR_BLOCKS; i++)
		CHECK_EQ(far_do(&t, WRITER, ISWF_WRITE, i, 0, 1), 0);
	CHECK_EQ(far_do(&t, 0, ISWF_DISCARD, 4, 0, 512), 0);
	CHECK_EQ(used(&w), FAR_BLOCKS - 1);
	CHECK_EQ(far_do(&t, 0, ISWF_READ, 4, 0, 1), -ENOENT);
	CHECK_EQ(far_do(&t, WRITER, ISWF_WRITE, 4, 0, 1), 0);
	leave_far(&t);
	finish(&w);
}

static void write_secrets(struct far_tester *t)
{
	fill(t, WRITER, SECRET);
	for (uint32_t i = 0; i < FAR_BLOCKS; i++)
		CHECK_EQ(far_do(t, WRITER, ISWF_WRITE, i, 0, ISWF_BLOCK_PAGES), 0);
}

/* F18, F20: what the dead have written nobody reads. */
TEST(blocks_of_the_dead_are_zeros)
{
	struct world w;
	struct far_tester t;

	begin(&w);
	in_child(&w, write_secrets);
	wait_used(&w, 0);
	t = connect_far(w.job);
	for (uint32_t i = 0; i < FAR_BLOCKS; i++) {
		memset(iswf_bytes(t.ring, WRITER), 0, ISWF_PAGE_BYTES);
		CHECK_EQ(far_do(&t, WRITER, ISWF_WRITE, i, 0, 1), 0);
		CHECK_EQ(far_do(&t, 0, ISWF_READ, i, 0, ISWF_BLOCK_PAGES), 0);
		for (uint32_t page = 0; page < ISWF_BLOCK_PAGES; page++)
			CHECK_EQ(word_of(&t, 0, page), 0);
	}
	leave_far(&t);
	finish(&w);
}

static void scribble(struct far_tester *t)
{
	uint64_t random = 4711;

	write_secrets(t);
	for (uint32_t i = 0; i < 2000; i++) {
		uint32_t slot = below(&random, ISWF_SLOTS);
		struct iswf_slot *s = &t->ring->slots[slot];
		const uint64_t one = 1;

		s->op = below(&random, 5);
		s->block = below(&random, FAR_BLOCKS + 1);
		s->first = below(&random, 513);
		s->pages = below(&random, 514);
		s->result = (int32_t)draw(&random);
		atomic_store(&s->state, below(&random, 4));
		fill(t, slot, 0);
		memset(iswf_bytes(t->ring, slot), (int)i, 64 * ISWF_PAGE_BYTES);
		(void)!write(t->bell[below(&random, 2)], &one, sizeof(one));
		if (i % 64 == 0)
			sched_yield();
	}
}

/* F10, F18, F19: a liar harms no donor, no other client, and is done with at its death. */
TEST(a_client_that_scribbles_harms_itself)
{
	struct world w;
	struct far_tester t;
	struct isw_engine_stats stats;

	begin(&w);
	in_child(&w, scribble);
	wait_used(&w, 0);
	t = connect_far(w.job);
	fill(&t, WRITER, SECRET);
	CHECK_EQ(far_do(&t, WRITER, ISWF_WRITE, 0, 0, ISWF_BLOCK_PAGES), 0);
	CHECK_EQ(far_do(&t, 0, ISWF_READ, 0, 0, ISWF_BLOCK_PAGES), 0);
	CHECK_EQ(word_of(&t, 0, 511), SECRET);
	isw_engine_stats(w.engine, &stats);
	CHECK_EQ(stats.crc_errors_remote, 0);
	CHECK_EQ(stats.requests_in_flight, 0);
	leave_far(&t);
	finish(&w);
}

/* F17: a job cannot pull the ring's memory away from under the device's process. */
TEST(a_ring_cannot_shrink)
{
	struct world w;
	struct far_tester t;

	begin(&w);
	t = connect_far(w.job);
	CHECK(ftruncate(t.ring_fd, 0) != 0 && errno == EPERM);
	CHECK(ftruncate(t.ring_fd, 2 * ISWF_RING_BYTES) != 0 && errno == EPERM);
	leave_far(&t);
	finish(&w);
}

TEST(hellos_that_make_no_sense_are_refused)
{
	struct world w;
	struct iswf_hello hello = {.magic = ISWF_MAGIC, .version = ISWF_VERSION};
	int uffd = open_uffd(), other = memfd_create("other", MFD_CLOEXEC);

	begin(&w);
	hello.version = ISWF_VERSION + 1;
	CHECK_EQ(connect_with(w.job, hello, uffd).welcome.refused, -EPROTO);
	hello.version = ISWF_VERSION;
	CHECK_EQ(connect_with(w.job, hello, other).welcome.refused, -EBADF);
	hello.client = 1; /* of a client that is not awaited, with a token of nobody's */
	CHECK_EQ(connect_with(w.job, hello, uffd).welcome.refused, -EINVAL);
	hello.client = UINT32_MAX;
	CHECK_EQ(connect_with(w.job, hello, uffd).welcome.refused, -EINVAL);
	close(uffd);
	close(other);
	finish(&w);
}

/* F21: a successor knows every client and its blocks, and gives nobody those of another. */
TEST(a_successor_gives_clients_their_blocks_again)
{
	struct world w;
	struct far_tester t, liar;
	struct iswf_hello hello = {.magic = ISWF_MAGIC, .version = ISWF_VERSION};
	int uffd = open_uffd();

	begin(&w);
	t = connect_far(w.job);
	fill(&t, WRITER, SECRET);
	CHECK_EQ(far_do(&t, WRITER, ISWF_WRITE, 7, 0, ISWF_BLOCK_PAGES), 0);
	hello.client = t.welcome.client;
	succeed(&w);
	CHECK_EQ(used(&w), 1);
	liar = connect_with(w.job, hello, uffd);
	CHECK_EQ(liar.welcome.refused, -EINVAL);
	memcpy(hello.token, t.welcome.token, sizeof(hello.token));
	leave_far(&t);
	t = connect_with(w.job, hello, uffd);
	CHECK_EQ(t.welcome.refused, 0);
	CHECK_EQ(far_do(&t, 0, ISWF_READ, 7, 0, ISWF_BLOCK_PAGES), 0);
	CHECK_EQ(word_of(&t, 0, 300), SECRET);
	leave_far(&t);
	wait_used(&w, 0);
	close(uffd);
	finish(&w);
}

/* A block device's requests end where the far range begins. */
TEST(no_block_request_reaches_the_far_range)
{
	struct world w;
	static char data[2 * ISW_PAGE_BYTES] __attribute__((aligned(4096)));

	begin(&w);
	CHECK_EQ(ask_and_wait(w.engine, ISWI_READ, BLOCK_BYTES / ISW_PAGE_BYTES - 1, 1, data), 0);
	CHECK_EQ(ask_and_wait(w.engine, ISWI_READ, BLOCK_BYTES / ISW_PAGE_BYTES, 1, data), -ENOSPC);
	CHECK_EQ(ask_and_wait(w.engine, ISWI_WRITE, BLOCK_BYTES / ISW_PAGE_BYTES - 1, 2, data),
		 -ENOSPC);
	CHECK_EQ(ask_and_wait(w.engine, ISWI_TRIM, BLOCK_BYTES / ISW_PAGE_BYTES, 1, NULL), -ENOSPC);
	finish(&w);
}
