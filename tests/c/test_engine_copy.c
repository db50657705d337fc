/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Copies of what the backup holds to a slab's new donor: they bring every page there, and give way
 * to whatever else happens to it.
 */
#include <unistd.h>

#include "engine_fixture.h"

/* `pages` pages of slab 0, page i holding 10 + i, are on the backup; its donor has none. */
static struct world *world_behind(uint32_t pages)
{
	struct world *w = world_new(0);

	if (pages)
		write_settled(w, 0, pages, 10);
	CHECK_EQ(remote_new(w), 0);
	map(w, 0, 0);
	return w;
}

/* The two moments at which something can come between. */
enum stage { READING, WRITING, STAGES };

/* Page 0 is being copied. */
static struct world *world_copying(enum stage stage)
{
	struct world *w = world_behind(1);

	fill(w, 0, 1, 1);
	DISK_TAKE_READ(w);
	if (stage == READING)
		return w;
	DISK_DONE(w, 0);
	CHECK_EQ(sent_for(w, 0, 0, ISWI_XFER_WRITE), 1);
	return w;
}

static void copy_goes_on(struct world *w, enum stage stage)
{
	if (stage == READING)
		DISK_DONE(w, 0); /* the only job under way */
	else
		REPLY(w, 0, 0); /* the first sent */
}

static void is_dropped(struct world *w)
{
	CHECK_EQ(stats_of(w).pages_copied, 0);
	CHECK_EQ(stats_of(w).pages_copy_dropped, 1);
}

/* ------------------------------------------------------------------ what is copied */

WORLD_TEST(what_the_donor_lacks_is_copied, world_behind(SLAB_PAGES))
{
	struct isw_slab_info before;
	uint64_t sent_before;

	trim(w, 3, 1);               /* nobody has it */
	write_settled(w, 5, 1, 500); /* the donor has it */
	before = slab_of(w, 0);
	sent_before = stats_of(w).pages_out_remote;
	CHECK_EQ(fill(w, 0, 100, 6), SLAB_PAGES);
	CHECK_EQ(stats_of(w).staging_pages_used, 6);
	settle(w);
	CHECK_EQ(stats_of(w).pages_copied, 6);
	CHECK_EQ(stats_of(w).pages_copy_dropped, 0);
	for (uint64_t page = 0; page < SLAB_PAGES; page++) {
		CHECK_EQ(is_remote_valid(w, page), page != 3);
		CHECK_EQ(is_backup_current(w, page), page != 3);
		CHECK_EQ(donor_value(w, 0, page), page == 3 ? 0 : page == 5 ? 500 : 10 + page);
	}
	/* It is no activity of the device's users. */
	CHECK_EQ(slab_of(w, 0).page_ins, before.page_ins);
	CHECK_EQ(slab_of(w, 0).page_outs, before.page_outs);
	CHECK_EQ(stats_of(w).pages_out_remote, sent_before);
	/* Again: there is nothing left. */
	CHECK_EQ(fill(w, 0, 100, 0), SLAB_PAGES);
	READ_FROM(w, remote, 0, 10);
	CHECK_EQ(stats_of(w).pages_in_backup, 0);
}

WORLD_TEST(a_run_is_one_read_and_one_write, world_behind(6))
{
	fill(w, 1, 5, 5);
	DISK_TAKE_READ(w);
	CHECK_EQ(iswi_sim_of(w->e)->jobs[0].op->pages, 5);
	DISK_DONE(w, 0);
	CHECK_EQ(sent(w, 0), 1);
	CHECK_EQ(iswi_sim_of(w->e)->donors[0]->pending[0].xfer->length, 5 * ISW_PAGE_BYTES);
	REPLY(w, 0, 0);
	CHECK_EQ(stats_of(w).pages_copied, 5);
	CHECK(!is_remote_valid(w, 0));
}

WORLD_TEST(as_many_as_asked_for_and_on_from_there, world_behind(SLAB_PAGES))
{
	CHECK_EQ(fill(w, 0, 0, 0), 0);
	CHECK_EQ(fill(w, 0, 3, 3), 3);
	CHECK_EQ(fill(w, 1, 3, 3), 6); /* those under way are passed over */
	CHECK_EQ(fill(w, 6, 3, 2), SLAB_PAGES);
	CHECK_EQ(fill(w, SLAB_PAGES, 3, 0), SLAB_PAGES);
	CHECK_EQ(fill(w, UINT32_MAX, UINT32_MAX, 0), SLAB_PAGES);
	settle(w);
	CHECK_EQ(stats_of(w).pages_copied, SLAB_PAGES);
}

WORLD_TEST(only_the_slabs_own_mapping_is_filled, world_behind(2))
{
	uint64_t generation = slab_of(w, 0).generation;
	uint32_t next;

	CHECK_EQ(isw_slab_fill(w->e, 0, generation + 1, 0, 9, &next), -ESTALE);
	CHECK_EQ(isw_slab_fill(w->e, 1, generation, 0, 9, &next), -ESTALE);
	CHECK_EQ(isw_slab_fill(w->e, SLABS, generation, 0, 9, &next), -EINVAL);
	BREAK(w, 0);
	CHECK_EQ(isw_slab_fill(w->e, 0, generation, 0, 9, &next), -ESTALE);
	unmap(w);
	CHECK_EQ(isw_slab_fill(w->e, 0, generation, 0, 9, &next), -ESTALE);
	CHECK_EQ(slab_of(w, 0).in_flight, 0);
}

WORLD_TEST(without_a_backup_there_is_nothing_to_copy, world_holding(ISW_ENGINE_NO_BACKUP, 0, 2, 10))
{
	unmap(w); /* both pages are lost, which the bits of the backup tell */
	map(w, 0, 0);
	CHECK_EQ(fill(w, 0, 9, 0), SLAB_PAGES);
}

WORLD_TEST(the_last_slab_may_be_short, WORLD_BUT(config.size_bytes -= 5 * ISW_PAGE_BYTES))
{
	uint32_t next;

	write_settled(w, PAGES - SLAB_PAGES, 3, 70);
	CHECK_EQ(remote_new(w), 0);
	map(w, SLABS - 1, 0);
	CHECK_EQ(isw_slab_fill(w->e, SLABS - 1, w->generations, 0, 9, &next), 3);
	CHECK_EQ(next, SLAB_PAGES);
	settle(w);
	CHECK_EQ(donor_value(w, 0, PAGES - SLAB_PAGES + 2), 72);
	CHECK_EQ(stats_of(w).pages_copied, 3);
}

/* ---------------------------------------------------------------- others go first */

WORLD_TEST(reads_go_before_copies, world_behind(4))
{
	uint32_t id;

	fill(w, 0, 1, 1);
	fill(w, 2, 1, 1);
	id = get(w, 1, 1);
	DISK_TAKE_READ(w);
	CHECK(!iswi_sim_of(w->e)->jobs[0].op->copy);
	DISK_TAKE_READ(w);
	CHECK(iswi_sim_of(w->e)->jobs[1].op->copy);
	/* One reader at most is at copies. */
	CHECK_EQ(step(w, ISW_STEP_BACKUP_TAKE, 1, 0), 0);
	get(w, 3, 1);
	DISK_TAKE_READ(w);
	CHECK(!iswi_sim_of(w->e)->jobs[2].op->copy);
	DISK_DONE(w, 0);
	CHECK_EQ(w->got[id][0], 11);
	settle(w);
	CHECK_EQ(stats_of(w).pages_copied, 2);
}

WORLD_TEST(copies_leave_half_of_the_buffers_free,
	   WORLD_BUT(config.slab_bytes = PAGES * ISW_PAGE_BYTES))
{
	uint32_t next = 5 + STAGING / 2;

	for (uint64_t page = 0; page < PAGES; page += 8)
		write_settled(w, page, 8, 10 + page);
	CHECK_EQ(remote_new(w), 0);
	map(w, 0, 0);
	CHECK_EQ(fill(w, 3, 100, STAGING / 2), 3 + STAGING / 2);
	CHECK_EQ(fill(w, 3 + STAGING / 2, 100, 0), 3 + STAGING / 2);
	settle(w);
	put(w, 0, 6, 600); /* has six buffers until the backup has them */
	CHECK_EQ(fill(w, 3 + STAGING / 2, 100, 2), next);
	settle(w);
	while (next < PAGES) {
		CHECK(fill_on(w, &next, 100) > 0);
		settle(w);
	}
	fill(w, 0, 100, 0);
	CHECK_EQ(slab_of(w, 0).remote_valid_pages, PAGES);
	CHECK_EQ(stats_of(w).pages_copied, PAGES - 3); /* the first three were written */
}

#define MANY_PAGES (3u * ISWI_COPY_PAGES_MAX)

WORLD_TEST(copies_under_way_are_bounded,
	   WORLD_BUT(config.size_bytes = config.slab_bytes = MANY_PAGES * ISW_PAGE_BYTES;
		     config.staging_pages = 2 * MANY_PAGES;
		     config.backup_write_bytes_max = 1 << 20))
{
	uint32_t next = 0;

	for (uint64_t page = 0; page < MANY_PAGES; page += 8)
		write_settled(w, page, 8, page);
	CHECK_EQ(isw_sim_remote(w->e, 2, 1, &next), 0);
	map(w, 0, 0);
	CHECK_EQ(fill_on(w, &next, UINT32_MAX), ISWI_COPY_PAGES_MAX);
	CHECK_EQ(next, ISWI_COPY_PAGES_MAX);
	CHECK_EQ(fill_on(w, &next, 1), 0);
	DISK_TAKE_READ(w);
	CHECK(iswi_sim_of(w->e)->jobs[0].op->pages <= 32); /* nor does one take the disk for long */
	DISK_DONE(w, 0);
	CHECK_EQ(fill_on(w, &next, 1), 0); /* read, but not yet written */
	REPLY(w, 0, 0);
	CHECK_EQ(fill_on(w, &next, UINT32_MAX), 32);
	while (next < MANY_PAGES) {
		int begun;

		disk_settle(w);
		remotes_settle(w);
		begun = fill_on(w, &next, UINT32_MAX);
		CHECK(begun > 0 && begun <= (int)ISWI_COPY_PAGES_MAX);
	}
	settle(w);
	CHECK_EQ(stats_of(w).pages_copied, MANY_PAGES);
	for (uint64_t page = 0; page < MANY_PAGES; page++)
		CHECK_EQ(donor_value(w, 0, page), page);
}

/* Half of the buffers hold what cannot be written; the rest, which copies have, comes back. */
WORLD_TEST(a_write_is_not_refused_while_copies_hold_buffers, world_behind(4))
{
	uint32_t id;

	fill(w, 0, 4, 4);
	put(w, SLAB_PAGES, 8, 100);
	put(w, 2 * SLAB_PAGES, 1, 200);
	for (int i = 0; i < 3; i++) { /* 4, 4 and 1 pages */
		DISK_REFUSE(w);
	}
	id = put(w, 3 * SLAB_PAGES, 4, 300); /* three buffers are left */
	CHECK_EQ(w->error[id], PENDING);
	DISK_READ(w);
	CHECK_EQ(w->error[id], PENDING);
	REPLY(w, 0, 0);
	END_WELL(w, id);
	CHECK_EQ(read_settled(w, 3 * SLAB_PAGES + 3), 303);
}

/* ------------------------------------------------------------------ reads meanwhile */

WORLD_TEST(a_read_meets_a_copy, world_copying(READING))
{
	uint32_t id = get(w, 0, 1);

	/* Its buffer holds nothing yet: from the backup. */
	CHECK_EQ(w->error[id], PENDING);
	DISK_TAKE_READ(w);
	DISK_DONE(w, 1);
	CHECK_EQ(w->got[id][0], 10);
	CHECK_EQ(stats_of(w).pages_in_backup, 1);
	DISK_DONE(w, 0);
	GOT(w, get(w, 0, 1), 10);
	CHECK_EQ(stats_of(w).pages_in_staging, 1);
	REPLY(w, 0, 0);
	READ_FROM(w, remote, 0, 10);
}

WORLD_TEST(a_read_that_fails_is_answered_from_the_copy, world_copying(READING))
{
	uint32_t id = get(w, 0, 1);

	DISK_READ(w);
	DISK_FAIL(w, 0);
	GOT(w, id, 10);
}

/* ------------------------------------------------------------- the donor is taken away */

WORLD_CASES(an_unmapped_slab_is_drained, STAGES, stage, world_copying(stage))
{
	unmap(w);
	/* The donor does not wait for our disk. */
	CHECK_EQ(w->events[ISW_EVENT_SLAB_DRAINED], stage == READING);
	copy_goes_on(w, stage);
	CHECK_EQ(w->events[ISW_EVENT_SLAB_DRAINED], 1);
	is_dropped(w);
	CHECK_EQ(sent(w, 0), 0);
	CHECK(!is_remote_valid(w, 0));
	CHECK_EQ(stats_of(w).staging_pages_used, 0);
	CHECK_EQ(read_settled(w, 0), 10);
}

/* The next mapping is another donor's business: its own copies are asked for. */
WORLD_TEST(a_copy_does_not_follow_its_slab, world_copying(READING))
{
	CHECK_EQ(remote_new(w), 1);
	unmap(w);
	map(w, 0, 1);
	DISK_DONE(w, 0);
	is_dropped(w);
	CHECK_EQ(sent(w, 0), 0);
	CHECK_EQ(sent(w, 1), 0);
	fill(w, 0, 1, 1);
	settle(w);
	CHECK_EQ(donor_value(w, 1, 0), 10);
	CHECK(is_remote_valid(w, 0));
}

WORLD_CASES(a_donor_goes_down, STAGES, stage, world_copying(stage))
{
	BREAK(w, 0);
	if (stage == READING)
		DISK_DONE(w, 0);
	is_dropped(w);
	CHECK(!is_remote_valid(w, 0));
	CHECK_EQ(stats_of(w).staging_pages_used, 0);
	CHECK_EQ(slab_of(w, 0).in_flight, 0);
	CHECK_EQ(read_settled(w, 0), 10);
	donor_returns(w, 0);
	fill(w, 0, 1, 1);
	settle(w);
	CHECK(is_remote_valid(w, 0));
	CHECK_EQ(donor_value(w, 0, 0), 10);
}

WORLD_TEST(a_refused_copy_is_reported, world_copying(WRITING))
{
	REFUSE(w, 0, 0);
	is_dropped(w);
	CHECK_EQ(w->events[ISW_EVENT_SLAB_ERROR], 1);
	CHECK_EQ(stats_of(w).remote_errors, 1);
	CHECK(!is_remote_valid(w, 0));
	CHECK_EQ(read_settled(w, 0), 10);
}

/* ---------------------------------------------------------------- the backup is bad */

WORLD_TEST(wrong_bytes_are_not_copied, world_behind(3))
{
	iswi_sim_of(w->e)->disk[ISW_PAGE_BYTES + 7] ^= 1;
	fill(w, 0, 3, 3);
	settle(w);
	CHECK_EQ(stats_of(w).pages_copied, 2);
	CHECK_EQ(stats_of(w).pages_copy_dropped, 1);
	CHECK_EQ(stats_of(w).crc_errors_backup, 1);
	CHECK(is_remote_valid(w, 0) && !is_remote_valid(w, 1) && is_remote_valid(w, 2));
	CHECK_EQ(donor_value(w, 0, 1), 0);
	/* A read judges, and finds it well where the copy only met a bad moment. */
	CHECK(is_backup_current(w, 1));
	CHECK_EQ(w->events[ISW_EVENT_BAD_PAGE], 0);
	iswi_sim_of(w->e)->disk[ISW_PAGE_BYTES + 7] ^= 1;
	CHECK_EQ(read_settled(w, 1), 11);
}

/* A read of a page that rots is answered, not repeated for as long as the copy takes. */
WORLD_TEST(a_bad_page_is_judged_while_a_copy_reads_it, world_copying(READING))
{
	uint32_t id = get(w, 0, 1);

	iswi_sim_of(w->e)->disk[7] ^= 1;
	for (int i = 0; i < 2; i++) {
		DISK_TAKE_READ(w);
		DISK_DONE(w, 1);
	}
	CHECK_EQ(w->error[id], -EIO);
	CHECK_EQ(w->events[ISW_EVENT_BAD_PAGE], 1);
}

WORLD_TEST(a_failed_read_copies_nothing, world_copying(READING))
{
	DISK_FAIL(w, 0);
	is_dropped(w);
	CHECK_EQ(stats_of(w).backup_errors, 1);
	CHECK_EQ(stats_of(w).crc_errors_backup, 0); /* nothing was looked at */
	CHECK_EQ(stats_of(w).staging_pages_used, 0);
	CHECK(is_backup_current(w, 0) && !is_remote_valid(w, 0));
	CHECK_EQ(w->events[ISW_EVENT_BACKUP_FAILING], 0);
	fill(w, 0, 1, 1);
	settle(w);
	CHECK(is_remote_valid(w, 0));
}

/* ------------------------------------------------------------------- nothing to save */

TEST_CASES(an_engine_may_end_in_the_middle_of_it, STAGES, stage)
{
	struct world *w = world_behind(5);

	fill(w, 0, 2, 2);
	DISK_TAKE_READ(w);
	if (stage == WRITING)
		DISK_DONE(w, 0);
	fill(w, 3, 9, 2); /* not even begun to be read */
	isw_engine_destroy(w->e);
	free(w);
}
