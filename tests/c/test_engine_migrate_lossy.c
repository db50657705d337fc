/* SPDX-License-Identifier: Apache-2.0 */
/* Slabs that migrate without a backup: nothing is lost that need not be, and the rest is said. */
#include "migrate_fixture.h"

/* -------------------------------------------------------------------- without a backup */

WORLD_TEST(a_complete_pull_loses_nothing, world_pulling(ISW_ENGINE_NO_BACKUP, READING, 6))
{
	REPLY(w, SOURCE, 0);
	source_is(w, 6, 0);
	CHECK_EQ(stats_of(w).staging_pages_used, 6);
	REPLY(w, TARGET, 0);
	migrated(w, 6, 0);
	source_is(w, 0, 0);
	CHECK_EQ(stats_of(w).staging_pages_used, 0);
	leave(w);
	CHECK_EQ(step(w, ISW_STEP_REMOTE_WIPE, SOURCE, 0), 1);
	for (uint64_t page = 0; page < 6; page++)
		CHECK_EQ(read_settled(w, page), 10 + page);
	CHECK_EQ(read_settled(w, 7), 0);
}

WORLD_TEST(what_is_still_at_the_source_is_lost_with_it, world_moving(ISW_ENGINE_NO_BACKUP, 6))
{
	write_settled(w, 1, 2, 21);
	trim(w, 4, 1);
	source_is(w, 3, 0);
	leave(w);
	for (uint64_t page = 0; page < SLAB_PAGES; page++) {
		bool lost = page == 0 || page == 3 || page == 5;
		int64_t value = page == 1 || page == 2 ? 20 + (int64_t)page : 0;

		CHECK_EQ(read_settled(w, page), lost ? -EIO : value);
	}
	/* Written again it is there again. */
	write_settled(w, 0, 1, 30);
	CHECK_EQ(read_settled(w, 0), 30);
	CHECK_EQ(read_settled(w, 3), -EIO);
}

/* Its copy is under way when its place is given up: that is no loss. */
WORLD_CASES(a_page_under_way_is_not_lost_with_the_source, STAGES, stage,
	    world_pulling(ISW_ENGINE_NO_BACKUP, stage, 2))
{
	uint32_t id;

	leave(w);
	CHECK_EQ(w->events[ISW_EVENT_SLAB_DRAINED], stage == WRITING);
	if (stage == READING)
		REPLY(w, SOURCE, 0);
	drained(w, SOURCE, 1);
	CHECK_EQ(step(w, ISW_STEP_REMOTE_WIPE, SOURCE, 0), 1);
	CHECK(!is_remote_valid(w, 0));
	id = get(w, 0, 2);
	CHECK_EQ(w->error[id], 0); /* staged */
	CHECK_EQ(w->got[id][1], 11);
	CHECK_EQ(stats_of(w).staging_pages_used, 2); /* R1: nobody else has it */
	REPLY(w, TARGET, 0);
	CHECK_EQ(stats_of(w).staging_pages_used, 0);
	CHECK(is_at(w, 0, TARGET) && is_at(w, 1, TARGET));
	CHECK(!is_backup_current(w, 0)); /* which would mean lost */
	CHECK_EQ(read_settled(w, 0), 10);
	CHECK_EQ(read_settled(w, 1), 11);
	CHECK_EQ(stats_of(w).pages_in_remote, 2);
}

/* Whatever becomes of its place: the bytes are still here, and there is another donor. */
WORLD_CASES(a_write_that_the_source_has_not_got_goes_to_the_target, 3, way,
	    world_writing(ISW_ENGINE_NO_BACKUP))
{
	uint32_t id = (uint32_t)iswi_sim_of(w->e)->ids; /* the write */

	if (way == 0) {
		BREAK(w, SOURCE);
	} else if (way == 1) {
		REFUSE(w, SOURCE, 0);
	} else {
		leave(w);
		REPLY(w, SOURCE, 0); /* it has got it, but is leaving */
		drained(w, SOURCE, 1);
	}
	CHECK_EQ(sent_for(w, TARGET, 0, ISWI_XFER_WRITE), 1);
	CHECK_EQ(read_settled(w, 0), 20);
	CHECK_EQ(w->error[id], 0);
	CHECK(is_at(w, 0, TARGET));
	CHECK_EQ(read_settled(w, 0), 20);
}

/* Once: a write that both have failed has failed. */
WORLD_TEST(a_write_that_both_have_failed_has_failed, world_writing(ISW_ENGINE_NO_BACKUP))
{
	uint32_t id = (uint32_t)iswi_sim_of(w->e)->ids;

	REFUSE(w, SOURCE, 0);
	CHECK_EQ(w->error[id], PENDING);
	REFUSE(w, TARGET, 0);
	CHECK_EQ(w->error[id], -EIO);
	CHECK_EQ(sent(w, SOURCE) + sent(w, TARGET), 0);
	CHECK_EQ(stats_of(w).staging_pages_used, 0);
	CHECK_EQ(read_settled(w, 0), -EIO);
	CHECK_EQ(read_settled(w, 1), 11);
}

/*
 * The copy under way was the last, and does not arrive: lost, which is said, and costs no buffer.
 */
WORLD_CASES(a_page_that_does_not_arrive_is_lost, 2, breaks,
	    world_pulling(ISW_ENGINE_NO_BACKUP, WRITING, 2))
{
	leave(w);
	if (breaks)
		BREAK(w, TARGET);
	else
		REFUSE(w, TARGET, 0);
	migrated(w, 0, 2);
	CHECK_EQ(stats_of(w).staging_pages_used, 0);
	CHECK_EQ(read_settled(w, 0), -EIO);
	CHECK_EQ(read_settled(w, 1), -EIO);
	CHECK_EQ(read_settled(w, 2), 0);
}

WORLD_CASES(pages_of_the_source_are_read_without_a_target, STAGES, stage,
	    world_pulling(ISW_ENGINE_NO_BACKUP, stage, 2))
{
	uint32_t id;

	BREAK(w, TARGET);
	unmap(w);
	CHECK_EQ(slab_of(w, 0).state, ISW_SLAB_UNMAPPED);
	settle(w);
	migrated(w, 0, 2);
	CHECK_EQ(stats_of(w).staging_pages_used, 0);
	CHECK_EQ(read_settled(w, 0), 10);
	id = put(w, 1, 1, 20); /* writes have nowhere to go */
	CHECK_EQ(w->error[id], -EIO);
	CHECK_EQ(read_settled(w, 1), 11); /* which says so before it has done harm */
	map(w, 0, THIRD);
	pull_again(w);
	source_is(w, 0, 0);
	leave(w);
	CHECK_EQ(read_settled(w, 0), 10);
	CHECK_EQ(read_settled(w, 1), 11);
}

WORLD_TEST(a_break_of_the_source_keeps_what_it_has, world_pulling(ISW_ENGINE_NO_BACKUP, READING, 2))
{
	BREAK(w, SOURCE);
	migrated(w, 0, 2);
	CHECK_EQ(read_settled(w, 0), -EIO); /* for now */
	reconnect(w, SOURCE);
	resume_source(w);
	CHECK_EQ(read_settled(w, 0), 10);
	pull_again(w);
	source_is(w, 0, 0);
	leave(w);
	CHECK_EQ(read_settled(w, 1), 11);
}

/* Page 0 is being pulled from donor 0 to the quiet one. */
static struct world *world_quiet(void)
{
	struct world *w = world_new(ISW_ENGINE_NO_BACKUP);

	CHECK_EQ(remote_new(w), SOURCE);
	CHECK_EQ(quiet_remote(w), TARGET);
	map(w, 0, SOURCE);
	write_settled(w, 0, 1, 10);
	migrate(w, 0, TARGET);
	CHECK_EQ(pull(w), 0);
	return w;
}

/* A pulled page arrives together with the break of another connection of the target's. */
WORLD_TEST(an_acknowledgement_counts_that_meets_the_break, world_quiet())
{
	REPLY(w, SOURCE, 0);
	CHECK(quiet.got);
	iswi_remote_fence(w->e, TARGET, -ECONNRESET);
	quiet.got->done(quiet.got, 0);
	reap(w);
	CHECK_EQ(slab_of(w, 0).state, ISW_SLAB_SUSPENDED);
	CHECK(is_at(w, 0, TARGET)); /* it is there, and will be after the resume */
	source_is(w, 0, 0);
}

/* Or somebody would find it neither there nor here. */
WORLD_TEST(a_page_is_staged_before_its_place_is_given_up, world_quiet())
{
	leave(w);
	REPLY(w, SOURCE, 0);
	CHECK_EQ(quiet.source_state, ISW_SLAB_DRAINING);
	CHECK_EQ(slab_of(w, 0).source_state, ISW_SLAB_UNMAPPED);
	quiet.got->done(quiet.got, 0);
	CHECK(is_at(w, 0, TARGET));
}
