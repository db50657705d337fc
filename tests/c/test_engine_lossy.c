/* SPDX-License-Identifier: Apache-2.0 */
/* Without a backup: what is lost is an error, never zeros; what is not lost goes on. */
#include "engine_fixture.h"

static struct world *world_lossy(void)
{
	return world_mapped(ISW_ENGINE_NO_BACKUP);
}

WORLD_TEST(writes_need_a_donor, world_lossy())
{
	uint32_t id = put(w, 8, 1, 100); /* slab 1 has none */

	CHECK_EQ(w->error[id], -EIO);
	CHECK_EQ(read_settled(w, 8), 0); /* never written: zeros */
	id = put(w, 7, 2, 200);
	CHECK_EQ(w->error[id], PENDING);
	REPLY(w, 0, 0);
	CHECK_EQ(w->error[id], -EIO); /* the half that has one is written all the same */
	CHECK_EQ(read_settled(w, 7), 200);
}

WORLD_TEST(a_refused_write_fails_and_its_page_is_lost,
	   world_holding(ISW_ENGINE_NO_BACKUP, 1, 1, 100))
{
	uint32_t id = put(w, 1, 1, 200);

	REFUSE(w, 0, 0);
	CHECK_EQ(w->error[id], -EIO);
	/* Neither the old bytes nor zeros. */
	CHECK_EQ(read_settled(w, 1), -EIO);
	CHECK_EQ(read_settled(w, 1), -EIO);
	write_settled(w, 1, 1, 300);
	CHECK_EQ(read_settled(w, 1), 300);
	trim(w, 1, 1);
	CHECK_EQ(read_settled(w, 1), 0);
}

WORLD_TEST(unmapping_loses_pages_and_says_so, world_holding(ISW_ENGINE_NO_BACKUP, 1, 2, 100))
{
	unmap(w);
	CHECK_EQ(read_settled(w, 1), -EIO);
	CHECK_EQ(read_settled(w, 3), 0);
	map(w, 0, 0);
	CHECK_EQ(read_settled(w, 1), -EIO); /* a new place does not bring it back */
	write_settled(w, 1, 1, 200);
	CHECK_EQ(read_settled(w, 1), 200);
	CHECK_EQ(read_settled(w, 2), -EIO);
	trim(w, 2, 1);
	CHECK_EQ(read_settled(w, 2), 0);
}

WORLD_TEST(a_break_keeps_what_the_donor_has, world_holding(ISW_ENGINE_NO_BACKUP, 1, 1, 100))
{
	uint32_t id;

	write_settled(w, 2, 1, 200);
	id = put(w, 2, 1, 201);
	BREAK(w, 0);
	CHECK_EQ(w->error[id], -EIO);
	donor_returns(w, 0);
	CHECK_EQ(read_settled(w, 1), 100);
	CHECK_EQ(read_settled(w, 2), -EIO); /* nobody knows what is there now */
	write_settled(w, 2, 1, 300);
	CHECK_EQ(read_settled(w, 2), 300);
}

WORLD_TEST(a_write_that_waits_for_a_transfer_ends_with_the_donor, world_lossy())
{
	uint32_t first = put(w, 1, 1, 100), second = put(w, 1, 1, 200);
	uint32_t third = put(w, 1, 1, 300);

	BREAK(w, 0);
	/* Those that wait can be sent nowhere, and must not hang. */
	CAME_TO(w, -EIO, first, second, third);
	CHECK_EQ(stats_of(w).staging_pages_used, 0);
	CHECK_EQ(read_settled(w, 1), -EIO);
	donor_returns(w, 0);
	write_settled(w, 1, 1, 400);
	CHECK_EQ(read_settled(w, 1), 400);
}

/* Buffers are few: neither what arrives while the slab drains nor what waited for it keeps one. */
WORLD_CASES(writes_to_a_slab_that_drains_end_with_the_mapping, 2, another_waits, world_lossy())
{
	uint32_t first = put(w, 1, 1, 100), second = another_waits ? put(w, 1, 1, 200) : 0;

	unmap(w);
	REPLY(w, 0, 0);
	CHECK_EQ(w->error[first], 0);
	if (another_waits)
		CHECK_EQ(w->error[second], -EIO);
	CHECK_EQ(stats_of(w).staging_pages_used, 0);
	CHECK_EQ(w->events[ISW_EVENT_SLAB_DRAINED], 1);
	CHECK_EQ(read_settled(w, 1), -EIO);
}

WORLD_TEST(a_flush_has_nothing_to_wait_for, world_lossy())
{
	uint32_t id = flush(w);

	CHECK_EQ(w->error[id], 0);
	id = submit(w, ISW_SIM_WRITE | ISW_SIM_FUA, 1, 1, 100);
	REPLY(w, 0, 0);
	CHECK_EQ(w->error[id], 0);
}

WORLD_TEST(writes_wait_for_buffers_and_go_on, world_lossy())
{
	uint32_t id;

	map(w, 1, 0);
	map(w, 2, 0);
	put(w, 0, 8, 100);
	put(w, 8, 8, 200);
	id = put(w, 16, 4, 300);
	CHECK_EQ(stats_of(w).staging_waits, 1);
	REPLY(w, 0, 0);
	CHECK_EQ(w->error[id], PENDING);
	END_WELL(w, id);
	/* And when the donor dies instead, they fail instead of waiting. */
	put(w, 0, 8, 100);
	put(w, 8, 8, 200);
	id = put(w, 16, 4, 300);
	BREAK(w, 0);
	CHECK_EQ(w->error[id], -EIO);
}

WORLD_TEST(an_acknowledgement_counts_that_meets_the_break, world_new(ISW_ENGINE_NO_BACKUP))
{
	uint32_t remote = quiet_remote(w), id;

	map(w, 0, remote);
	id = put(w, 1, 1, 100);
	CHECK(quiet.got);
	/* Another connection breaks; this one's thread is just busy with the reply. */
	iswi_remote_fence(w->e, remote, -ECONNRESET);
	quiet.got->done(quiet.got, 0);
	reap(w);
	CHECK_EQ(w->error[id], 0);
	CHECK_EQ(slab_of(w, 0).state, ISW_SLAB_SUSPENDED);
	CHECK(is_remote_valid(w, 1)); /* it is there, and will be after the resume */
}
