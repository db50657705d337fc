/* SPDX-License-Identifier: Apache-2.0 */
/* TRIM and WRITE_ZEROES: what was there may not come back. */
#include "engine_fixture.h"

WORLD_CASES(trimmed_pages_are_zeros_wherever_they_were, 2, n, world_mapped(0))
{
	uint32_t id;

	write_settled(w, 1, 4, 100); /* donor and disk */
	write_settled(w, 9, 2, 200); /* disk */
	put(w, 4, 1, 300);           /* staged */
	id = submit(w, n ? ISW_SIM_ZERO : ISW_SIM_TRIM, 2, 8, 0);
	CHECK_EQ(w->error[id], 0); /* at once: no copy of zeros is needed */
	id = get(w, 1, 8);
	READ_ENDS(w, id, 100);
	for (uint32_t k = 1; k < 8; k++)
		CHECK_EQ(w->got[id][k], 0);
	CHECK_EQ(read_settled(w, 9), 0);
	CHECK_EQ(read_settled(w, 10), 201);
	CHECK_EQ(slab_of(w, 0).remote_valid_pages, 1);
}

WORLD_TEST(trim_cancels_staging_and_the_queued_backup, world_new(0))
{
	uint32_t id = put(w, 1, 2, 100);

	trim(w, 1, 1);
	CHECK_EQ(stats_of(w).staging_pages_used, 1);
	DISK_TAKE(w);
	CHECK_EQ(iswi_sim_of(w->e)->jobs[0].page, 2);
	CHECK_EQ(iswi_sim_of(w->e)->jobs[0].pages, 1);
	DISK_NOTHING(w);
	DISK_DONE(w, 0);
	CHECK_EQ(w->error[id], 0);
	CHECK_EQ(read_settled(w, 1), 0);
	CHECK_EQ(read_settled(w, 2), 101);
}

WORLD_TEST(trim_completes_the_writes_it_makes_void, world_mapped(0))
{
	uint32_t first = put(w, 1, 1, 100), second = put(w, 1, 1, 200), wide = put(w, 2, 2, 300);

	trim(w, 1, 2);
	CAME_TO(w, 0, first, second);
	CHECK_EQ(w->error[wide], PENDING); /* page 3 is safe nowhere yet */
	END_WELL(w, wide);
	CHECK_EQ(read_settled(w, 3), 301);
}

WORLD_TEST(a_late_acknowledgement_does_not_resurrect, world_mapped(0))
{
	put(w, 1, 1, 100);
	put(w, 1, 1, 200);
	trim(w, 1, 1);
	REPLY(w, 0, 0);
	CHECK_EQ(sent(w, 0), 0); /* the second is not sent any more */
	CHECK(!is_remote_valid(w, 1));
	CHECK_EQ(donor_value(w, 0, 1), 100);
	CHECK_EQ(read_settled(w, 1), 0);
}

WORLD_CASES(a_late_backup_write_does_not_resurrect, 2, fails, world_new(0))
{
	put(w, 1, 1, 100);
	DISK_TAKE(w);
	trim(w, 1, 1);
	CHECK_EQ(stats_of(w).staging_pages_used, 1); /* the disk still reads from it */
	if (fails)
		DISK_FAIL(w, 0);
	else
		DISK_DONE(w, 0);
	CHECK_EQ(disk_value(w, 1), fails ? TORN : 100);
	CHECK(!is_backup_current(w, 1));
	CHECK_EQ(stats_of(w).backup_failing, 0);
	CHECK_EQ(stats_of(w).staging_pages_used, 0);
	CHECK_EQ(read_settled(w, 1), 0);
}

WORLD_TEST(a_write_after_a_trim_waits_for_what_is_in_flight, world_mapped(0))
{
	uint32_t id;

	put(w, 1, 1, 100);
	DISK_TAKE(w);
	trim(w, 1, 1);
	id = put(w, 1, 1, 200);
	CHECK_EQ(sent_for(w, 0, 1, ISWI_XFER_WRITE), 1);
	DISK_NOTHING(w);
	REPLY(w, 0, 0);
	CHECK(!is_remote_valid(w, 1));
	CHECK_EQ(w->error[id], PENDING); /* that was the older one */
	CHECK_EQ(sent_for(w, 0, 1, ISWI_XFER_WRITE), 1);
	DISK_DONE(w, 0);
	CHECK(!is_backup_current(w, 1));
	CHECK_EQ(w->error[id], PENDING);
	END_WELL(w, id);
	CHECK_EQ(donor_value(w, 0, 1), 200);
	CHECK_EQ(disk_value(w, 1), 200);
	CHECK_EQ(read_settled(w, 1), 200);
}

WORLD_TEST(trim_frees_buffers_for_writes_that_wait, world_new(0))
{
	uint32_t id;

	put(w, 0, 8, 100);
	put(w, 8, 8, 200);
	id = put(w, 16, 2, 300);
	CHECK_EQ(stats_of(w).staging_waits, 1);
	trim(w, 0, 2);
	CHECK_EQ(stats_of(w).staging_pages_used, STAGING);
	END_WELL(w, id);
	CHECK_EQ(read_settled(w, 17), 301);
	CHECK_EQ(read_settled(w, 0), 0);
}

WORLD_TEST(trim_of_a_page_whose_backup_failed_ends_the_failure, world_new(0))
{
	uint32_t id = put(w, 1, 1, 100);

	DISK_REFUSE(w);
	CHECK_EQ(stats_of(w).backup_failing, 1);
	trim(w, 1, 1);
	CHECK_EQ(w->error[id], 0);
	CHECK_EQ(stats_of(w).backup_failing, 0);
	CHECK_EQ(stats_of(w).staging_pages_used, 0);
	CHECK_EQ(step(w, ISW_STEP_BACKUP_RETRY, 0, 0), 0);
	id = flush(w);
	END_WELL(w, id);
}

WORLD_TEST(a_read_in_flight_at_a_trim_sees_old_bytes_or_zeros, world_holding(0, 1, 1, 100))
{
	uint32_t id = get(w, 1, 1);

	trim(w, 1, 1);
	REPLY(w, 0, 0);
	CHECK_EQ(w->error[id], 0);
	CHECK(w->got[id][0] == 100 || w->got[id][0] == 0);
	CHECK_EQ(read_settled(w, 1), 0);
}

/* More than a word of the bitmaps, its ends inside of one. */
WORLD_TEST(a_large_trim_reaches_every_page,
	   WORLD_BUT(config.size_bytes = config.slab_bytes = 500 * ISW_PAGE_BYTES))
{
	for (uint32_t page = 0; page < 500; page += 7)
		write_settled(w, page, 1, 1000 + page);
	CHECK_EQ(w->error[trim(w, 8, 476)], 0);
	for (uint32_t page = 0; page < 500; page += 7)
		CHECK_EQ(read_settled(w, page), page < 8 || page >= 484 ? 1000 + page : 0);
}
