/* SPDX-License-Identifier: Apache-2.0 */
/* The rules of writing: one function each, every event ordered by hand. */
#include "engine_fixture.h"

WORLD_TEST(remote_valid_is_cleared_before_sending, world_holding(0, 1, 1, 100))
{
	uint32_t id = put(w, 1, 1, 200);

	CHECK_EQ(sent_for(w, 0, 1, ISWI_XFER_WRITE), 1);
	CHECK(!is_remote_valid(w, 1));
	/* The connection is cut in the middle of the page: the donor has a torn one. */
	CHECK_EQ(step(w, ISW_STEP_REMOTE_TEAR, 0, 0), 1);
	CHECK_EQ(donor_value(w, 0, 1), TORN);
	donor_returns(w, 0);
	END_WELL(w, id);
	read_elsewhere(w, 1, 200);
	CHECK_EQ(stats_of(w).crc_errors_remote, 0);
}

WORLD_TEST(nothing_follows_a_broken_connection_until_resume, world_mapped(0))
{
	uint32_t old = put(w, 1, 1, 100), id;

	BREAK(w, 0);
	CHECK_EQ(w->events[ISW_EVENT_REMOTE_DOWN], 1);
	CHECK_EQ(slab_of(w, 0).state, ISW_SLAB_SUSPENDED);
	id = put(w, 1, 1, 200);
	CHECK_EQ(sent(w, 0), 0);
	CHECK_EQ(step(w, ISW_STEP_REMOTE_LATE, 0, 0), 1); /* the old connection's last word */
	CHECK_EQ(donor_value(w, 0, 1), 100);
	reconnect(w, 0);
	/* Connected again, but whether the slab is still ours only Python knows. */
	CHECK_EQ(slab_of(w, 0).state, ISW_SLAB_SUSPENDED);
	put(w, 2, 1, 300);
	CHECK_EQ(sent(w, 0), 0);
	resume(w, 0);
	END_WELL(w, old, id);
	CHECK_EQ(read_settled(w, 1), 200);
}

WORLD_TEST(a_late_write_after_resume_is_impossible, world_mapped(0))
{
	put(w, 1, 1, 100);
	BREAK(w, 0);
	reconnect(w, 0); /* stands for a renewed lease: the donor has fenced the old epoch */
	resume(w, 0);
	CHECK_EQ(step(w, ISW_STEP_REMOTE_LATE, 0, 0), 0);
	settle(w);
	write_settled(w, 1, 1, 200);
	CHECK(is_remote_valid(w, 1));
	CHECK_EQ(donor_value(w, 0, 1), 200);
	READ_FROM(w, remote, 1, 200);
}

WORLD_TEST(a_page_written_while_suspended_is_not_read_remotely, world_holding(0, 1, 2, 100))
{
	BREAK(w, 0);
	write_settled(w, 1, 1, 200);
	donor_returns(w, 0);
	read_elsewhere(w, 1, 200);
	/* Its neighbour, untouched, is still good there. */
	READ_FROM(w, remote, 2, 101);
}

WORLD_TEST(a_write_unacknowledged_at_the_break_is_not_read_remotely, world_holding(0, 1, 1, 100))
{
	put(w, 1, 1, 200);
	APPLY(w, 0, 0); /* it landed, but nobody told us */
	BREAK(w, 0);
	settle(w);
	donor_returns(w, 0);
	read_elsewhere(w, 1, 200);
}

WORLD_TEST(an_older_mappings_ack_does_not_set_remote_valid, world_mapped(0))
{
	uint64_t generation = slab_of(w, 0).generation;

	put(w, 1, 1, 100);
	put(w, 2, 1, 101);
	CHECK_EQ(isw_slab_unmap(w->e, 0, 0, generation), 0);
	REPLY(w, 0, 0);
	/* The other one keeps the slab DRAINING: nothing has cleared bits in the meantime. */
	CHECK_EQ(slab_of(w, 0).state, ISW_SLAB_DRAINING);
	CHECK(!is_remote_valid(w, 1));
	REPLY(w, 0, 0);
	CHECK_EQ(slab_of(w, 0).state, ISW_SLAB_UNMAPPED);
	CHECK_EQ(slab_of(w, 0).remote_valid_pages, 0);
	settle(w);
	CHECK_EQ(read_settled(w, 1), 100);
}

WORLD_TEST(one_remote_write_of_a_page_is_in_flight, world_mapped(0))
{
	uint32_t ids[4];

	for (uint32_t i = 0; i < 4; i++) {
		ids[i] = put(w, 1, 1, 100 * (i + 1));
		CHECK_EQ(sent_for(w, 0, 1, ISWI_XFER_WRITE), 1);
	}
	REPLY(w, 0, 0);
	CHECK_EQ(donor_value(w, 0, 1), 100);
	CHECK_EQ(w->error[ids[0]], 0);
	CHECK_EQ(w->error[ids[1]], PENDING);
	CHECK(!is_remote_valid(w, 1)); /* an older version's acknowledgement */
	/* Then the newest; those between are never sent. */
	CHECK_EQ(sent_for(w, 0, 1, ISWI_XFER_WRITE), 1);
	REPLY(w, 0, 0);
	CHECK(is_remote_valid(w, 1));
	CHECK_EQ(donor_value(w, 0, 1), 400);
	CHECK_EQ(sent(w, 0), 0);
	for (uint32_t i = 0; i < 4; i++)
		CHECK_EQ(w->error[ids[i]], 0); /* a newer version's copy is as good */
}

WORLD_TEST(overlapping_writes_share_no_page_in_flight, world_mapped(0))
{
	put(w, 0, 4, 100);
	put(w, 2, 4, 200); /* pages 2 and 3 wait, 4 and 5 go */
	for (uint32_t page = 0; page < 6; page++)
		CHECK_EQ(sent_for(w, 0, page, ISWI_XFER_WRITE), 1);
	/* The later transfer ends first; nothing of the earlier is disturbed. */
	REPLY(w, 0, 1);
	CHECK(is_remote_valid(w, 4) && is_remote_valid(w, 5));
	CHECK_EQ(sent_for(w, 0, 2, ISWI_XFER_WRITE), 1);
	REPLY(w, 0, 0);
	CHECK(is_remote_valid(w, 0) && is_remote_valid(w, 1) && !is_remote_valid(w, 2));
	remotes_settle(w);
	CHECK_EQ(donor_value(w, 0, 2), 200);
	CHECK_EQ(donor_value(w, 0, 3), 201);
	CHECK_EQ(slab_of(w, 0).remote_valid_pages, 6);
}

WORLD_TEST(one_backup_write_of_a_page_is_in_flight, world_new(0))
{
	uint32_t first = put(w, 1, 1, 100), second, third;

	DISK_TAKE(w);
	second = put(w, 1, 1, 200);
	third = put(w, 1, 1, 300);
	DISK_NOTHING(w); /* io_uring or a second thread may land the older one last */
	DISK_DONE(w, 0);
	CHECK_EQ(w->error[first], 0);
	CHECK_EQ(w->error[second], PENDING);
	CHECK(!is_backup_current(w, 1)); /* the disk's version is not the newest */
	CHECK_EQ(disk_value(w, 1), 100);
	DISK_WRITE(w);
	CAME_TO(w, 0, second, third);
	CHECK(is_backup_current(w, 1));
	CHECK_EQ(disk_value(w, 1), 300);
	DISK_NOTHING(w);
}

WORLD_TEST(newer_data_supersedes_what_the_backup_has_queued, world_new(0))
{
	put(w, 1, 1, 100);
	put(w, 1, 1, 200);
	put(w, 1, 1, 300);
	CHECK_EQ(stats_of(w).pages_out_superseded, 2);
	DISK_TAKE(w);
	DISK_NOTHING(w);
	DISK_DONE(w, 0);
	DISK_NOTHING(w);
	CHECK_EQ(disk_value(w, 1), 300);
	CHECK_EQ(stats_of(w).pages_out_backup, 1);
	CHECK_EQ(stats_of(w).requests_in_flight, 0);
}

WORLD_TEST(neighbours_are_merged_into_one_backup_write, world_new(0))
{
	put(w, 2, 1, 102); /* the oldest; its neighbours on both sides came later */
	put(w, 3, 1, 103);
	put(w, 1, 1, 101);
	put(w, 4, 1, 104);
	put(w, 5, 1, 105);
	put(w, 9, 1, 109);
	DISK_TAKE(w);
	CHECK_EQ(iswi_sim_of(w->e)->jobs[0].page, 1);
	CHECK_EQ(iswi_sim_of(w->e)->jobs[0].pages, 4); /* backup_write_bytes_max */
	disk_settle(w);
	CHECK_EQ(stats_of(w).backup_write_requests, 3);
	for (uint32_t page = 1; page <= 5; page++)
		CHECK_EQ(disk_value(w, page), 100 + page);
	CHECK_EQ(disk_value(w, 9), 109);
}

WORLD_TEST(done_on_the_acknowledgement_and_not_before, world_mapped(0))
{
	uint32_t id = put(w, 1, 1, 100);

	CHECK_EQ(w->error[id], PENDING);
	APPLY(w, 0, 0);
	DISK_TAKE(w);
	CHECK_EQ(w->error[id], PENDING); /* landed or under way is not acknowledged */
	REPLY(w, 0, 0);
	CHECK_EQ(w->error[id], 0);
	CHECK_EQ(stats_of(w).staging_pages_used, 1);
}

WORLD_TEST(done_only_when_each_page_is_safe, world_mapped(0))
{
	uint32_t id;

	map(w, 2, 0);
	id = put(w, 6, 4, 100); /* two pages of a mapped slab, two of an unmapped one */
	REPLY(w, 0, 0);
	CHECK_EQ(w->error[id], PENDING);
	disk_settle(w);
	CHECK_EQ(w->error[id], 0);
	id = put(w, 14, 4, 200);
	disk_settle(w);
	CHECK_EQ(w->error[id], 0);
	id = put(w, 14, 4, 300);
	REPLY(w, 0, 0); /* slab 2's of the last write */
	REPLY(w, 0, 0);
	CHECK_EQ(w->error[id], PENDING);
}

WORLD_TEST(staging_is_held_until_both_copies_ended, world_mapped(0))
{
	uint32_t id = put(w, 1, 1, 100);

	REPLY(w, 0, 0);
	CHECK_EQ(w->error[id], 0);
	CHECK_EQ(stats_of(w).staging_pages_used, 1);
	BREAK(w, 0); /* acknowledged, and gone before the backup has it */
	GOT(w, get(w, 1, 1), 100);
	disk_settle(w);
	CHECK_EQ(stats_of(w).staging_pages_used, 0);
	READ_FROM(w, backup, 1, 100);
}

WORLD_TEST(a_buffer_being_sent_is_not_reused, world_mapped(0))
{
	put(w, 1, 1, 100);
	disk_settle(w);
	CHECK_EQ(sent(w, 0), 1);
	CHECK_EQ(stats_of(w).staging_pages_used, 1);
	/* Fill all other buffers with something else: what is sent stays what it was. */
	for (uint32_t i = 0; i < 2; i++)
		put(w, 16, 8, 500);
	disk_settle(w);
	REPLY(w, 0, 0);
	CHECK_EQ(donor_value(w, 0, 1), 100);
	CHECK_EQ(stats_of(w).staging_pages_used, 0);
}

WORLD_TEST(a_donors_refusal_falls_back_and_is_told_once, world_mapped(0))
{
	uint32_t first = put(w, 1, 1, 100), second = put(w, 2, 1, 200);

	REFUSE(w, 0, 0);
	REFUSE(w, 0, 0);
	CAME_TO(w, PENDING, first, second);
	CHECK_EQ(w->events[ISW_EVENT_SLAB_ERROR], 1);
	CHECK_EQ(w->last[ISW_EVENT_SLAB_ERROR].slab, 0);
	CHECK_EQ(w->last[ISW_EVENT_SLAB_ERROR].generation, slab_of(w, 0).generation);
	CHECK_EQ(stats_of(w).remote_errors, 2);
	CHECK(!is_remote_valid(w, 1));
	disk_settle(w);
	CAME_TO(w, 0, first, second);
	READ_FROM(w, backup, 1, 100);
	CHECK_EQ(stats_of(w).fallback_invalid, 1);
	CHECK_EQ(w->events[ISW_EVENT_REMOTE_DOWN], 0);
}

WORLD_TEST(a_refused_write_does_not_hold_up_the_newer_one, world_mapped(0))
{
	uint32_t first = put(w, 1, 1, 100), second = put(w, 1, 1, 200);

	REFUSE(w, 0, 0);
	CHECK_EQ(sent_for(w, 0, 1, ISWI_XFER_WRITE), 1);
	REPLY(w, 0, 0);
	CAME_TO(w, 0, first, second);
	CHECK(is_remote_valid(w, 1));
	CHECK_EQ(donor_value(w, 0, 1), 200);
}

WORLD_TEST(requests_are_split_at_slab_borders, world_mapped(0))
{
	uint32_t id;

	CHECK_EQ(remote_new(w), 1);
	CHECK_EQ(isw_slab_map(w->e, 1, 1, 3, ++w->generations), 0); /* to slot 3 */
	put(w, 6, 4, 100);
	CHECK_EQ(sent(w, 0), 1);
	CHECK_EQ(sent(w, 1), 1);
	settle(w);
	CHECK_EQ(donor_value(w, 0, 6), 100);
	CHECK_EQ(donor_value(w, 0, 7), 101);
	CHECK_EQ(donor_value(w, 1, 3 * SLAB_PAGES), 102);
	CHECK_EQ(donor_value(w, 1, 3 * SLAB_PAGES + 1), 103);
	id = get(w, 5, 5);
	CHECK_EQ(sent(w, 0), 1);
	CHECK_EQ(sent(w, 1), 1);
	READ_ENDS(w, id, 0);
	for (uint32_t i = 0; i < 4; i++)
		CHECK_EQ(w->got[id][i + 1], 100 + i);
	CHECK_EQ(slab_of(w, 0).page_ins, 3);
	CHECK_EQ(slab_of(w, 1).page_ins, 2);
	CHECK_EQ(slab_of(w, 1).page_outs, 2);
}

WORLD_TEST(waiting_writes_go_on_in_their_order_and_reads_do_not_wait, world_new(0))
{
	uint32_t wide, narrow[2], id;

	write_settled(w, 31, 1, 77);
	put(w, 0, 8, 100);
	put(w, 8, 7, 200);
	wide = put(w, 16, 4, 300); /* one buffer is left: three pages wait */
	narrow[0] = put(w, 0, 1, 400);
	narrow[1] = put(w, 0, 1, 500);
	CHECK_EQ(stats_of(w).staging_pages_used, STAGING);
	CHECK_EQ(stats_of(w).staging_waits, 3);
	id = get(w, 31, 1);
	DISK_READ(w);
	GOT(w, id, 77);
	END_WELL(w, wide, narrow[0], narrow[1]);
	/* The last of two writes to one page, asked for in this order, is what stays. */
	CHECK_EQ(read_settled(w, 0), 500);
	for (uint32_t i = 0; i < 4; i++)
		CHECK_EQ(read_settled(w, 16 + i), 300 + i);
}

WORLD_TEST(a_small_write_does_not_overtake_a_waiting_one, world_new(0))
{
	uint32_t first, second;

	put(w, 0, 8, 100);
	put(w, 8, 8, 200);
	first = put(w, 16, 8, 300);
	second = put(w, 16, 1, 400);
	/* Four buffers become free: they are the first one's, all of them. */
	DISK_WRITE(w);
	CHECK_EQ(stats_of(w).staging_pages_used, STAGING);
	CAME_TO(w, PENDING, first, second);
	END_WELL(w, first, second);
	CHECK_EQ(read_settled(w, 16), 400);
}

WORLD_TEST(a_remote_write_ends_after_its_buffers_are_wanted, world_mapped(0))
{
	uint32_t id;

	/* All buffers are held by the donor's slow writes; the requests are long done. */
	map(w, 1, 0);
	put(w, 0, 8, 100);
	put(w, 8, 8, 200);
	disk_settle(w);
	CHECK_EQ(stats_of(w).requests_in_flight, 0);
	CHECK_EQ(stats_of(w).staging_pages_used, STAGING);
	id = put(w, 16, 1, 300);
	CHECK_EQ(stats_of(w).staging_waits, 1);
	REPLY(w, 0, 1); /* its end alone, without any backup's, must wake the waiting write */
	disk_settle(w);
	CHECK_EQ(w->error[id], 0);
}

/* ------------------------------------------- when the backup's writers begin to write */

static void time_passes(struct world *w, uint64_t us)
{
	iswi_sim_of(w->e)->now_ns += us * 1000;
}

WORLD_TEST(a_page_on_its_way_to_a_donor_waits_for_neighbours, world_mapped(0))
{
	CHECK(!iswi_backup_due(w->e));
	put(w, 0, 1, 100);
	REPLY(w, 0, 0);
	CHECK(!iswi_backup_due(w->e));
	time_passes(w, 2500);
	put(w, 1, 1, 200); /* the first one counts */
	time_passes(w, 3000);
	CHECK(iswi_backup_due(w->e));
	DISK_WRITE(w);
	CHECK_EQ(stats_of(w).backup_write_requests, 1);
	CHECK(!iswi_backup_due(w->e)); /* nothing is queued */
	put(w, 2, 1, 300);
	CHECK(!iswi_backup_due(w->e)); /* its own time begins */
}

WORLD_TEST(enough_pages_for_one_write_wait_for_no_more, world_mapped(0))
{
	put(w, 0, 3, 100);
	CHECK(!iswi_backup_due(w->e));
	put(w, 3, 1, 200);
	CHECK(iswi_backup_due(w->e));
	DISK_WRITE(w);
	CHECK_EQ(stats_of(w).backup_write_requests, 1);
}

WORLD_TEST(a_page_that_only_the_backup_gets_does_not_wait, world_mapped(0))
{
	put(w, 0, 1, 100);
	put(w, SLAB_PAGES, 1, 200); /* of a slab that is nowhere */
	CHECK(iswi_backup_due(w->e));
	disk_settle(w);
	put(w, 0, 1, 300);
	CHECK(!iswi_backup_due(w->e));
	unmap(w);
	put(w, 0, 1, 400); /* of a page that is queued */
	CHECK(iswi_backup_due(w->e));
}

/* What somebody waits for, and what was queued before it; nothing that comes later. */
WORLD_CASES(what_is_queued_after_a_hurry_waits_for_neighbours, 2, taken_as_a_neighbour,
	    world_mapped(0))
{
	put(w, 0, 1, 100);
	put(w, taken_as_a_neighbour ? 1 : SLAB_PAGES, 1, 200);
	if (taken_as_a_neighbour)
		iswi_backup_hurry(w->e);
	put(w, 4, 1, 300);
	CHECK(iswi_backup_due(w->e));
	DISK_WRITE(w);
	if (!taken_as_a_neighbour) {
		CHECK(iswi_backup_due(w->e));
		DISK_WRITE(w);
	}
	CHECK(!iswi_backup_due(w->e));
	time_passes(w, 5000);
	CHECK(iswi_backup_due(w->e));
}

WORLD_TEST(a_page_that_nobody_waits_for_leaves_the_hurry_to_others, world_mapped(0))
{
	put(w, 0, 1, 100);
	put(w, SLAB_PAGES, 1, 200);
	put(w, 4, 1, 300);
	trim(w, SLAB_PAGES, 1);
	CHECK(iswi_backup_due(w->e));
	trim(w, 0, 1);
	CHECK(!iswi_backup_due(w->e));
}

/* Under steady load the queue is never empty: each page has its own time all the same. */
WORLD_TEST(a_page_has_its_own_time_behind_one_whose_time_has_come, world_mapped(0))
{
	put(w, 0, 1, 100);
	time_passes(w, 5000);
	CHECK(iswi_backup_due(w->e));
	put(w, 4, 1, 200);
	DISK_WRITE(w);
	CHECK(!iswi_backup_due(w->e));
	time_passes(w, 5000);
	CHECK(iswi_backup_due(w->e));
}

WORLD_TEST(a_flush_waits_for_no_neighbours, world_mapped(0))
{
	uint32_t id;

	put(w, 0, 1, 100);
	REPLY(w, 0, 0);
	id = flush(w);
	CHECK(iswi_backup_due(w->e));
	disk_settle(w);
	CHECK_EQ(w->error[id], 0);
	put(w, 0, 1, 200);
	CHECK(!iswi_backup_due(w->e));
}
