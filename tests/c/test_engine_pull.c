/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Pulling a slab from its source to where it is now: brings every page, gives way to whatever else
 * happens to it, and loses nothing when either donor fails.
 */
#include <unistd.h>

#include "migrate_fixture.h"

/* ------------------------------------------------------------------------ pulling */

WORLD_TEST(a_pull_brings_everything, world_moving(0, SLAB_PAGES))
{
	struct isw_slab_info before;
	uint64_t sent_before;

	trim(w, 3, 1);
	write_settled(w, 5, 1, 500);
	before = slab_of(w, 0);
	sent_before = stats_of(w).pages_out_remote;
	source_is(w, 6, 0);
	CHECK_EQ(pull(w), 0);
	source_is(w, 6, 1);
	CHECK_EQ(stats_of(w).staging_pages_used, 6);
	settle(w);
	migrated(w, 6, 0);
	source_is(w, 0, 0);
	for (uint64_t page = 0; page < SLAB_PAGES; page++) {
		CHECK_EQ(is_at(w, page, TARGET), page != 3);
		CHECK_EQ(donor_value(w, TARGET, page), page == 3 ? 0 : page == 5 ? 500 : 10 + page);
	}
	/* It is no activity of the device's users. */
	CHECK_EQ(slab_of(w, 0).page_ins, before.page_ins);
	CHECK_EQ(slab_of(w, 0).page_outs, before.page_outs);
	CHECK_EQ(stats_of(w).pages_out_remote, sent_before);
	CHECK_EQ(slab_of(w, 0).remote_valid_pages, 7);
	/* Again: there is nothing left. */
	CHECK_EQ(pull_slab(w, 0, 1), 0);
	CHECK_EQ(sent(w, SOURCE), 0);
	leave(w);
	drained(w, SOURCE, 1);
	CHECK_EQ(step(w, ISW_STEP_REMOTE_WIPE, SOURCE, 0), 1);
	for (uint64_t page = 0; page < SLAB_PAGES; page++)
		CHECK_EQ(read_settled(w, page), page == 3 ? 0 : page == 5 ? 500 : 10 + page);
	CHECK_EQ(stats_of(w).pages_in_backup, 0);
}

WORLD_TEST(only_a_slab_at_both_ends_is_pulled, world_moving(0, 2))
{
	uint64_t generation = slab_of(w, 0).generation;

	CHECK_EQ(isw_slab_pull(w->e, SLABS, generation, 0), -EINVAL);
	CHECK_EQ(isw_slab_pull(w->e, 0, generation + 1, 0), -ESTALE);
	CHECK_EQ(isw_slab_pull(w->e, 0, 1, 0), -ESTALE); /* its source's */
	CHECK_EQ(isw_slab_pull(w->e, 1, generation, 0), -ESTALE);
	map(w, 1, TARGET);
	CHECK_EQ(pull_slab(w, 1, 0), -ESTALE); /* does not migrate */
	BREAK(w, SOURCE);
	CHECK_EQ(pull(w), -ESTALE);
	reconnect(w, SOURCE);
	CHECK_EQ(pull(w), -ESTALE);
	resume_source(w);
	BREAK(w, TARGET);
	CHECK_EQ(pull(w), -ESTALE);
	donor_returns(w, TARGET);
	get(w, 0, 1);
	leave(w);
	CHECK_EQ(slab_of(w, 0).source_state, ISW_SLAB_DRAINING);
	CHECK_EQ(pull(w), -ESTALE);
	settle(w);
	CHECK_EQ(pull(w), -ESTALE);
	CHECK_EQ(slab_of(w, 0).in_flight + slab_of(w, 0).source_in_flight, 0);
}

WORLD_TEST(a_pulled_page_is_at_the_source_until_the_acknowledgement, world_pulling(0, READING, 2))
{
	uint32_t id = get(w, 0, 1);

	/* Its buffer holds nothing yet. */
	CHECK_EQ(w->error[id], PENDING);
	CHECK_EQ(sent_for(w, SOURCE, 0, ISWI_XFER_READ), 2);
	REPLY(w, SOURCE, 1);
	CHECK_EQ(w->got[id][0], 10);
	REPLY(w, SOURCE, 0);
	CHECK(is_at(w, 0, SOURCE) && is_at(w, 1, SOURCE));
	source_is(w, 2, 0);
	id = get(w, 0, 2);
	CHECK_EQ(w->error[id], 0);
	CHECK_EQ(w->got[id][1], 11);
	CHECK_EQ(stats_of(w).pages_in_staging, 2);
	APPLY(w, TARGET, 0);
	CHECK(is_at(w, 0, SOURCE) && is_at(w, 1, SOURCE));
	REPLY(w, TARGET, 0);
	CHECK(is_at(w, 0, TARGET) && is_at(w, 1, TARGET));
	source_is(w, 0, 0);
	migrated(w, 2, 0);
	CHECK_EQ(stats_of(w).staging_pages_used, 0);
}

WORLD_TEST(a_page_with_a_write_in_flight_is_passed_over,
	   world_writing(0)) /* page 0, at the source */
{
	CHECK_EQ(pull(w), 0);
	CHECK_EQ(sent_for(w, SOURCE, 0, ISWI_XFER_READ), 0);
	CHECK_EQ(sent_for(w, SOURCE, 1, ISWI_XFER_READ), 1);
	settle(w);
	migrated(w, 1, 0);
	source_is(w, 1, 0);
	/* A second pass finds it. */
	CHECK_EQ(pull(w), 0);
	CHECK_EQ(sent(w, SOURCE), 0);
	pull_again(w);
	migrated(w, 2, 0);
	source_is(w, 0, 0);
	CHECK_EQ(donor_value(w, TARGET, 0), 20);
}

WORLD_TEST(a_page_is_pulled_once, world_pulling(0, READING, 3))
{
	for (int i = 0; i < 3; i++)
		CHECK_EQ(pull_slab(w, 0, 1), 0);
	CHECK_EQ(sent(w, SOURCE), 1);
	REPLY(w, SOURCE, 0);
	CHECK_EQ(pull_slab(w, 0, 1), 0);
	CHECK_EQ(sent(w, SOURCE), 0);
	CHECK_EQ(sent(w, TARGET), 1);
	settle(w);
	migrated(w, 3, 0);
}

/* ----------------------------------------------------------------- the source is bad */

/* Either donor: the pages stay where they are. */
WORLD_CASES(a_pull_that_is_refused_moves_nothing, STAGES, stage, world_pulling(0, stage, 3))
{
	uint32_t refuses = stage == READING ? SOURCE : TARGET;

	REFUSE(w, refuses, 0);
	migrated(w, 0, 3);
	CHECK_EQ(w->events[ISW_EVENT_SLAB_ERROR], 1);
	CHECK_EQ(w->last[ISW_EVENT_SLAB_ERROR].remote, refuses);
	CHECK_EQ(w->last[ISW_EVENT_SLAB_ERROR].generation, refuses == SOURCE ? 1 : 2);
	CHECK_EQ(sent(w, SOURCE) + sent(w, TARGET), 0);
	CHECK_EQ(stats_of(w).staging_pages_used, 0);
	CHECK_EQ(stats_of(w).crc_errors_remote, 0); /* nothing was looked at */
	source_is(w, 3, 0);
	READ_FROM(w, remote, 2, 12);
	pull_again(w);
	migrated(w, 3, 3);
}

/* A donor that refuses, either of them, is not asked for all the rest. */
WORLD_CASES(a_pull_ends_with_its_errors, STAGES, stage, world_large(512, 64))
{
	CHECK_EQ(pull(w), 1);
	CHECK_EQ(sent(w, SOURCE), 1);
	if (stage == WRITING)
		REPLY(w, SOURCE, 0);
	REFUSE(w, stage == READING ? SOURCE : TARGET, 0);
	CHECK_EQ(sent(w, SOURCE) + sent(w, TARGET), 0);
	migrated(w, 0, 32);
	source_is(w, 512, 0);
	pull_slab(w, 0, 1); /* until it is told to */
	CHECK_EQ(sent(w, SOURCE), 1);
}

WORLD_TEST(wrong_bytes_are_not_pulled, world_moving(0, 3))
{
	unsigned char *byte = iswi_sim_of(w->e)->donors[SOURCE]->memory + ISW_PAGE_BYTES + 7;

	*byte ^= 1;
	pull_all(w);
	migrated(w, 2, 1);
	CHECK_EQ(stats_of(w).crc_errors_remote, 1);
	CHECK_EQ(stats_of(w).crc_errors_backup, 0);
	CHECK(is_at(w, 0, TARGET) && is_at(w, 1, SOURCE) && is_at(w, 2, TARGET));
	CHECK_EQ(donor_value(w, TARGET, 1), 0);
	source_is(w, 1, 0);
	/* A read judges, and finds it well where the pull only met a bad moment. */
	CHECK_EQ(w->events[ISW_EVENT_BAD_PAGE], 0);
	*byte ^= 1;
	CHECK_EQ(read_settled(w, 1), 11);
	CHECK_EQ(pull_slab(w, 0, 1), 0);
	CORRUPT(w, SOURCE, 0);
	CHECK_EQ(sent(w, TARGET), 0);
	CHECK(is_at(w, 1, SOURCE));
	pull_again(w);
	CHECK(is_at(w, 1, TARGET));
}

WORLD_CASES(a_source_that_breaks, STAGES, stage, world_pulling(0, stage, 2))
{
	BREAK(w, SOURCE);
	CHECK_EQ(slab_of(w, 0).state, ISW_SLAB_MAPPED);
	CHECK_EQ(slab_of(w, 0).source_state, ISW_SLAB_SUSPENDED);
	if (stage == READING) {
		migrated(w, 0, 2);
		source_is(w, 2, 0); /* bits are kept */
		READ_FROM(w, backup, 0, 10);
		reconnect(w, SOURCE);
		CHECK_EQ(slab_of(w, 0).source_state, ISW_SLAB_SUSPENDED);
		resume_source(w);
		READ_FROM(w, remote, 0, 10);
		pull_again(w);
		migrated(w, 2, 2);
	} else {
		/* What was read is pulled all the same. */
		REPLY(w, TARGET, 0);
		migrated(w, 2, 0);
	}
	CHECK(is_at(w, 0, TARGET) && is_at(w, 1, TARGET));
	source_is(w, 0, 0);
}

WORLD_TEST(a_source_that_broke_is_given_up, world_moving(0, 2))
{
	write_settled(w, 1, 1, 21);
	CHECK_EQ(pull(w), 0);
	CHECK_EQ(sent(w, SOURCE), 1);
	BREAK(w, SOURCE);
	leave(w);
	drained(w, SOURCE, 1);
	CHECK_EQ(slab_of(w, 0).source_state, ISW_SLAB_UNMAPPED);
	CHECK_EQ(slab_of(w, 0).remote_valid_pages, 1);
	READ_FROM(w, backup, 0, 10);
	READ_FROM(w, remote, 1, 21);
}

WORLD_TEST(a_source_is_drained_after_its_last_transfer, world_pulling(0, READING, 2))
{
	uint32_t read = get(w, 1, 1);

	put(w, 4, 1, 400); /* the target's own business */
	CHECK_EQ(slab_of(w, 0).source_in_flight, 2);
	leave(w);
	CHECK_EQ(slab_of(w, 0).source_state, ISW_SLAB_DRAINING);
	get(w, 1, 1); /* nothing new is sent there */
	CHECK_EQ(sent(w, SOURCE), 2);
	not_drained(w);
	REPLY(w, SOURCE, 0);
	not_drained(w);
	/* The pull goes on: what was read is staged, and none the worse for that. */
	CHECK_EQ(sent_for(w, TARGET, 0, ISWI_XFER_WRITE), 1);
	REPLY(w, SOURCE, 0);
	drained(w, SOURCE, 1);
	CHECK_EQ(w->got[read][0], 11);
	CHECK_EQ(slab_of(w, 0).in_flight, 2);
	settle(w);
	migrated(w, 2, 0);
	CHECK(is_at(w, 0, TARGET) && is_at(w, 1, TARGET) && is_at(w, 4, TARGET));
	drained(w, SOURCE, 1);
}

/* Nothing new is sent there, nor is what is under way begun anew. */
WORLD_TEST(a_pull_does_not_go_on_at_a_source_that_drains, world_large(512, 64))
{
	CHECK_EQ(pull(w), 1);
	get(w, 511, 1); /* keeps it in use */
	leave(w);
	REPLY(w, SOURCE, 0);
	REPLY(w, TARGET, 0);
	migrated(w, 32, 0);
	not_drained(w);
	CHECK_EQ(sent(w, SOURCE), 1);
	CHECK_EQ(pull(w), -ESTALE);
	REPLY(w, SOURCE, 0);
	drained(w, SOURCE, 1);
	CHECK_EQ(slab_of(w, 0).remote_valid_pages, 32);
}

/* ----------------------------------------------------------------- the target is bad */

WORLD_TEST(a_torn_page_is_not_pulled, world_pulling(0, WRITING, 1))
{
	CHECK_EQ(step(w, ISW_STEP_REMOTE_TEAR, TARGET, 0), 1);
	CHECK_EQ(donor_value(w, TARGET, 0), TORN);
	migrated(w, 0, 1);
	CHECK_EQ(slab_of(w, 0).state, ISW_SLAB_SUSPENDED);
	CHECK(is_at(w, 0, SOURCE));
	CHECK_EQ(read_settled(w, 0), 10);
	donor_returns(w, TARGET);
	CHECK(is_at(w, 0, SOURCE));
	pull_again(w);
	migrated(w, 1, 1);
	CHECK(is_at(w, 0, TARGET));
	CHECK_EQ(read_settled(w, 0), 10);
	CHECK_EQ(stats_of(w).pages_in_remote, 2);
	CHECK_EQ(stats_of(w).crc_errors_remote, 0);
}

/* Then the slab is nowhere, but for its source; and goes on to a third donor. */
WORLD_TEST(a_target_that_is_lost, world_moving(0, 2))
{
	uint64_t generation = slab_of(w, 0).generation;
	uint32_t id;

	write_settled(w, 4, 1, 400);
	BREAK(w, TARGET);
	CHECK_EQ(slab_of(w, 0).state, ISW_SLAB_SUSPENDED);
	READ_FROM(w, backup, 4, 400);
	unmap(w);
	drained(w, TARGET, generation);
	CHECK_EQ(slab_of(w, 0).state, ISW_SLAB_UNMAPPED);
	CHECK_EQ(slab_of(w, 0).source_state, ISW_SLAB_MAPPED);
	CHECK(!is_remote_valid(w, 4));
	READ_FROM(w, remote, 0, 10);
	id = put(w, 5, 1, 500); /* the source gets nothing new */
	CHECK_EQ(sent(w, SOURCE), 0);
	END_WELL(w, id);
	CHECK(!is_remote_valid(w, 5));
	map(w, 0, THIRD);
	write_settled(w, 6, 1, 600);
	CHECK(is_at(w, 6, THIRD));
}

/* The same in the middle of a pull, which finds another donor where it was to go. */
WORLD_CASES(a_pull_does_not_follow_its_slab, STAGES, stage, world_pulling(0, stage, 2))
{
	uint64_t generation = slab_of(w, 0).generation;

	BREAK(w, TARGET);
	unmap(w);
	drained(w, TARGET, generation);
	CHECK(is_at(w, 0, SOURCE) && is_at(w, 1, SOURCE));
	CHECK_EQ(try_migrate(w, 0, THIRD), -EINVAL); /* from where to where? */
	map(w, 0, THIRD);
	CHECK_EQ(slab_of(w, 0).source_state, ISW_SLAB_MAPPED);
	if (stage == READING)
		REPLY(w, SOURCE, 0);
	migrated(w, 0, 2);
	CHECK_EQ(sent(w, THIRD), 0);
	READ_FROM(w, remote, 0, 10);
	pull_again(w);
	migrated(w, 2, 2);
	CHECK(is_at(w, 0, THIRD) && is_at(w, 1, THIRD));
	CHECK_EQ(donor_value(w, THIRD, 1), 11);
	leave(w);
	CHECK_EQ(read_settled(w, 1), 11);
	CHECK_EQ(stats_of(w).pages_in_remote, 2);
}

WORLD_CASES(each_place_has_its_own_bits, 2, source_first, world_moving(0, 4))
{
	write_settled(w, 1, 2, 21);
	if (source_first)
		leave(w);
	else
		unmap(w);
	for (uint64_t page = 0; page < 4; page++) {
		bool moved = page == 1 || page == 2;

		CHECK_EQ(is_at(w, page, moved ? TARGET : SOURCE), moved == source_first);
		CHECK_EQ(read_settled(w, page), (moved ? 20 : 10) + page);
	}
	CHECK_EQ(slab_of(w, 0).remote_valid_pages, 2);
	CHECK_EQ(stats_of(w).pages_in_remote, 2);
	if (source_first)
		unmap(w);
	else
		leave(w);
	CHECK_EQ(slab_of(w, 0).remote_valid_pages, 0);
	CHECK_EQ(w->events[ISW_EVENT_SLAB_DRAINED], 2);
	CHECK_EQ(slab_of(w, 0).state, ISW_SLAB_UNMAPPED);
	/* A slab that is nowhere is mapped as ever. */
	map(w, 0, THIRD);
	write_settled(w, 0, 1, 30);
	CHECK(is_at(w, 0, THIRD));
}

/* ----------------------------------------------------- slabs, groups, and their borders */

WORLD_TEST(the_slab_next_to_it_is_left_alone, world_moving(0, SLAB_PAGES))
{
	for (uint32_t slab = 1; slab < 4; slab++) {
		map(w, slab, SOURCE);
		write_settled(w, slab * SLAB_PAGES, SLAB_PAGES, 100 * slab);
		migrate(w, slab, TARGET);
	}
	CHECK_EQ(pull_slab(w, 2, 0), 0);
	settle(w);
	migrated(w, SLAB_PAGES, 0);
	for (uint64_t page = 0; page < PAGES; page++)
		CHECK(is_at(w, page, page / SLAB_PAGES == 2 ? TARGET : SOURCE));
	source_is(w, SLAB_PAGES, 0);
	CHECK_EQ(leave_slab(w, 2), 0);
	for (uint64_t page = 0; page < PAGES; page++)
		CHECK(is_at(w, page, page / SLAB_PAGES == 2 ? TARGET : SOURCE));
	CHECK_EQ(read_settled(w, 2 * SLAB_PAGES + 7), 207);
	CHECK_EQ(read_settled(w, 3 * SLAB_PAGES), 300);
}

/* One pull for all, which does one slab after the other. */
WORLD_TEST(slabs_are_pulled_in_turn, world_moving(0, SLAB_PAGES))
{
	map(w, 1, SOURCE);
	write_settled(w, SLAB_PAGES, SLAB_PAGES, 100);
	migrate(w, 1, TARGET);
	CHECK_EQ(pull(w), 0);
	CHECK_EQ(stats_of(w).staging_pages_used, 8); /* the copies' share */
	CHECK_EQ(pull_slab(w, 1, 0), 0);
	CHECK_EQ(stats_of(w).staging_pages_used, 8);
	settle(w);
	migrated(w, SLAB_PAGES, 0);
	CHECK_EQ(pull_slab(w, 1, 0), 0); /* the pass is over ... */
	CHECK_EQ(sent(w, SOURCE), 0);
	CHECK_EQ(pull_slab(w, 1, 1), 0); /* ... but not the last */
	settle(w);
	migrated(w, 2 * SLAB_PAGES, 0);
	CHECK_EQ(donor_value(w, TARGET, SLAB_PAGES + 5), 105);
	/* Back to the first, for what may be left there. */
	CHECK_EQ(pull(w), 0);
	CHECK_EQ(sent(w, SOURCE), 0);
}

WORLD_TEST(a_slab_that_migrates_again_is_pulled_from_its_start, world_moving(0, 3))
{
	pull_all(w);
	leave(w);
	migrate(w, 0, THIRD);
	CHECK_EQ(pull(w), 0); /* nobody said `again`: this pass is the first */
	CHECK_EQ(sent(w, TARGET), 1);
	settle(w);
	migrated(w, 6, 0);
	CHECK(is_at(w, 0, THIRD) && is_at(w, 2, THIRD));
}

/* Slabs that begin and end within a group of the bitmaps, and a last one cut short. */
static const uint32_t slabs_of[] = {4, 20, 32, 48, 100};

TEST_CASES(every_page_of_any_slab_is_pulled, ISWI_ARRAY_LEN(slabs_of), n)
{
	uint32_t slab_pages = slabs_of[n], pages = SLABS * slab_pages - slab_pages / 2;
	struct world *w = with_three(WORLD_BUT(config.slab_bytes = slab_pages * ISW_PAGE_BYTES;
					       config.size_bytes = pages * ISW_PAGE_BYTES;
					       config.staging_pages = 4 * slab_pages + 16));

	for (uint32_t slab = 0; slab < SLABS; slab++)
		map(w, slab, SOURCE);
	for (uint64_t page = 0; page < pages; page++)
		write_settled(w, page, 1, 10 + page);
	for (uint32_t slab = 0; slab < SLABS; slab++)
		migrate(w, slab, TARGET);
	for (uint32_t slab = 0; slab < SLABS; slab++) {
		uint32_t end = (slab + 1) * slab_pages;

		end = end < pages ? end : pages;
		CHECK_EQ(pull_slab(w, slab, 0), 0);
		settle(w);
		migrated(w, end, 0);
		CHECK_EQ(leave_slab(w, slab), 0);
		for (uint64_t page = 0; page < pages; page++)
			CHECK(is_at(w, page, page < end ? TARGET : SOURCE));
	}
	for (uint64_t page = 0; page < pages; page++)
		CHECK_EQ(donor_value(w, TARGET, page), 10 + page);
	world_end(w);
}

/* ------------------------------------------------------------- the copies' share, used up */

WORLD_TEST(a_pull_sets_its_own_pace, world_large(1024, 1024))
{
	uint32_t under_way = 0;

	CHECK_EQ(pull(w), 1);
	CHECK_EQ(sent(w, SOURCE), 8);
	for (uint32_t i = 0; i < 8; i++)
		CHECK_EQ(iswi_sim_of(w->e)->donors[SOURCE]->pending[i].xfer->length,
			 32 * ISW_PAGE_BYTES);
	CHECK_EQ(stats_of(w).staging_pages_used, ISWI_COPY_PAGES_MAX);
	/* Each that has arrived begins another one; nobody calls. */
	while (sent(w, SOURCE) + sent(w, TARGET)) {
		if (sent(w, SOURCE))
			REPLY(w, SOURCE, 0);
		else
			REPLY(w, TARGET, 0);
		under_way = stats_of(w).staging_pages_used;
		CHECK(under_way <= ISWI_COPY_PAGES_MAX);
	}
	migrated(w, 1024, 0);
	source_is(w, 0, 0);
	CHECK_EQ(pull(w), 0);
}

/* Pages that cannot be pulled just now do not end it for the others. */
WORLD_TEST(a_pull_goes_on_past_what_it_drops, world_large(1024, 1024))
{
	CHECK_EQ(pull(w), 1);
	trim(w, 0, 256); /* all that is under way */
	settle(w);
	migrated(w, 1024 - 256, 256);
	source_is(w, 0, 0);
}

WORLD_TEST(a_second_pass_finds_what_the_first_left, world_large(512, 64))
{
	uint32_t passes = 0;

	CHECK_EQ(pull(w), 1);
	CHECK_EQ(stats_of(w).staging_pages_used, 32);
	CHECK_EQ(sent(w, SOURCE), 1);
	settle(w);
	CHECK(stats_of(w).pages_migrated >= 64 && stats_of(w).pages_migrated < 512);
	CHECK_EQ(pull(w), 0); /* it has come to the end by itself */
	CHECK_EQ(sent(w, SOURCE), 0);
	while (stats_of(w).pages_migrated < 512) {
		pull_slab(w, 0, 1);
		settle(w);
		CHECK(passes++ < 8);
	}
	migrated(w, 512, 0);
	source_is(w, 0, 0);
	for (uint64_t page = 0; page < 512; page++)
		CHECK_EQ(donor_value(w, TARGET, page), 10 + page);
}

WORLD_TEST(a_pull_without_buffers_goes_on_when_asked_again, world_large(512, 64))
{
	uint32_t calls = 0;

	for (uint64_t page = 0; page < 32; page += 8)
		put(w, page, 8, 1000 + page); /* half of the buffers */
	CHECK_EQ(pull(w), 1);
	CHECK_EQ(sent(w, SOURCE), 0);
	settle(w);
	migrated(w, 0, 0); /* not by itself */
	CHECK_EQ(pull(w), 0);
	CHECK_EQ(sent(w, SOURCE), 1);
	settle(w);
	CHECK(stats_of(w).pages_migrated > 0);
	while (stats_of(w).pages_migrated < 512 - 32) {
		pull_slab(w, 0, 1);
		settle(w);
		CHECK(calls++ < 8);
	}
	migrated(w, 512 - 32, 0); /* the rest was written to the target */
	source_is(w, 0, 0);
	CHECK_EQ(read_settled(w, 31), 1031);
}

/* ------------------------------------------------------------- flushes, and the end */

TEST_CASES(an_engine_may_end_in_the_middle_of_it, STAGES, stage)
{
	struct world *w = world_pulling(0, stage, 3);

	isw_engine_destroy(w->e);
	free(w);
}
