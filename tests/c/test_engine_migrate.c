/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Slabs that migrate: each page is where it was valid last, writes go to the new place, and a pull
 * brings the rest there while everything else goes on. One order of events per test.
 */
#include <pthread.h>
#include <sched.h>
#include <time.h>
#include <unistd.h>

#include "engine_fixture.h"

#define SOURCE 0u
#define TARGET 1u
#define THIRD  2u

/* ---------------------------------------------------------------------- control */

static int try_migrate(struct world *w, uint32_t slab, uint32_t remote)
{
	return isw_slab_migrate(w->e, slab, remote, slab, ++w->generations);
}

static void migrate(struct world *w, uint32_t slab, uint32_t remote)
{
	CHECK_EQ(try_migrate(w, slab, remote), 0);
}

static int pull_slab(struct world *w, uint32_t slab, uint32_t again)
{
	int code = isw_slab_pull(w->e, slab, slab_of(w, slab).generation, again);

	reap(w);
	return code;
}

/* Slab 0, from where the pass has come to. */
static int pull(struct world *w)
{
	return pull_slab(w, 0, 0);
}

static int leave_slab(struct world *w, uint32_t slab)
{
	struct isw_slab_info info = slab_of(w, slab);
	int code = isw_slab_unmap(w->e, slab, info.source_remote, info.source_generation);

	reap(w);
	return code;
}

/* Slab 0's source is given up. */
static void leave(struct world *w)
{
	CHECK_EQ(leave_slab(w, 0), 0);
}

/* Slab 0's current place is. */
static void unmap(struct world *w)
{
	CHECK_EQ(isw_slab_unmap(w->e, 0, slab_of(w, 0).remote, slab_of(w, 0).generation), 0);
	reap(w);
}

static void resume_source(struct world *w)
{
	CHECK_EQ(isw_slab_resume(w->e, 0, slab_of(w, 0).source_remote,
				 slab_of(w, 0).source_generation),
		 0);
}

/* ---------------------------------------------------------------------- looking */

/* What isw_slab_pages_at says of slab 0's source. */
static void source_is(struct world *w, uint32_t pages, int more)
{
	struct isw_slab_info info = slab_of(w, 0);
	uint32_t got = 99;

	CHECK_EQ(isw_slab_pages_at(w->e, 0, info.source_remote, info.source_generation, &got),
		 more);
	CHECK_EQ(got, pages);
}

static bool is_at(const struct world *w, uint64_t page, uint32_t remote)
{
	uint32_t slab = (uint32_t)(page / w->e->slab_pages);

	return is_remote_valid(w, page) &&
	       iswi_place_remote(iswi_place(w->e, slab, iswi_place_at(w->e, page))) == remote;
}

static void migrated(const struct world *w, uint64_t pages, uint64_t dropped)
{
	CHECK_EQ(stats_of(w).pages_migrated, pages);
	CHECK_EQ(stats_of(w).pages_copy_dropped, dropped);
	CHECK_EQ(stats_of(w).pages_copied, 0);
}

/* DRAINED was reported once, of this donor. */
static void drained(const struct world *w, uint32_t remote, uint64_t generation)
{
	CHECK_EQ(w->events[ISW_EVENT_SLAB_DRAINED], 1);
	CHECK_EQ(w->last[ISW_EVENT_SLAB_DRAINED].slab, 0);
	CHECK_EQ(w->last[ISW_EVENT_SLAB_DRAINED].remote, remote);
	CHECK_EQ(w->last[ISW_EVENT_SLAB_DRAINED].generation, generation);
}

static void not_drained(const struct world *w)
{
	CHECK_EQ(w->events[ISW_EVENT_SLAB_DRAINED], 0);
}

/* ----------------------------------------------------------------------- worlds */

static struct world *world_of_three(const struct isw_engine_config *config)
{
	struct world *w = world_of(config);

	for (uint32_t remote = SOURCE; remote <= THIRD; remote++)
		CHECK_EQ(remote_new(w), remote);
	return w;
}

/* `pages` pages of slab 0, page i holding 10 + i, are at its source (and on the backup). */
static struct world *world_moving(uint32_t flags, uint32_t pages)
{
	struct isw_engine_config config = world_config(flags);
	struct world *w = world_of_three(&config);

	map(w, 0, SOURCE);
	if (pages)
		write_settled(w, 0, pages, 10);
	migrate(w, 0, TARGET);
	return w;
}

/* The two moments at which something can come between. */
enum stage { READING, WRITING, STAGES };

/* So many pages are being pulled, in one run. */
static struct world *world_pulling(uint32_t flags, enum stage stage, uint32_t pages)
{
	struct world *w = world_moving(flags, pages);

	CHECK_EQ(pull(w), 0); /* the slab is not large */
	CHECK_EQ(sent(w, SOURCE), 1);
	CHECK_EQ(sent_for(w, SOURCE, 0, ISWI_XFER_READ), 1);
	if (stage == READING)
		return w;
	REPLY(w, SOURCE, 0);
	CHECK_EQ(sent(w, SOURCE), 0);
	CHECK_EQ(sent(w, TARGET), 1);
	CHECK_EQ(sent_for(w, TARGET, 0, ISWI_XFER_WRITE), 1);
	return w;
}

/* The first transfer sent. */
static void pull_goes_on(struct world *w, enum stage stage)
{
	REPLY(w, stage == READING ? SOURCE : TARGET, 0);
}

/* Nothing is left at the source, nor under way. */
static void moving_end(struct world *w)
{
	settle(w);
	for (uint32_t slab = 0; slab < w->e->slabs_count; slab++)
		CHECK_EQ(slab_of(w, slab).source_in_flight, 0);
	world_end(w);
}

/* A large slab on a device of its own, everything at the source. */
static struct world *world_large(uint32_t pages, uint32_t staging)
{
	struct isw_engine_config config = world_config(0);
	struct world *w;

	config.size_bytes = config.slab_bytes = pages * ISW_PAGE_BYTES;
	config.staging_pages = staging;
	w = world_of_three(&config);
	map(w, 0, SOURCE);
	for (uint64_t page = 0; page < pages; page += 8)
		write_settled(w, page, 8, 10 + page);
	migrate(w, 0, TARGET);
	return w;
}

/* ---------------------------------------------------------- mapped to one more donor */

static void a_slab_has_a_source_until_it_is_unmapped(void)
{
	struct world *w = world_moving(0, 2);
	struct isw_slab_info info = slab_of(w, 0);

	CHECK_EQ(info.state, ISW_SLAB_MAPPED);
	CHECK_EQ(info.remote, TARGET);
	CHECK_EQ(info.generation, 2);
	CHECK_EQ(info.source_state, ISW_SLAB_MAPPED);
	CHECK_EQ(info.source_remote, SOURCE);
	CHECK_EQ(info.source_generation, 1);
	CHECK_EQ(info.remote_valid_pages, 2);
	CHECK_EQ(isw_remote_destroy(w->e, SOURCE), -EBUSY);
	leave(w);
	drained(w, SOURCE, 1);
	info = slab_of(w, 0);
	CHECK_EQ(info.state, ISW_SLAB_MAPPED);
	CHECK_EQ(info.remote, TARGET);
	CHECK_EQ(info.source_state, ISW_SLAB_UNMAPPED);
	CHECK_EQ(info.source_remote, ISW_NO_REMOTE);
	CHECK_EQ(info.remote_valid_pages, 0);
	CHECK_EQ(isw_remote_destroy(w->e, SOURCE), 0);
	CHECK_EQ(isw_remote_destroy(w->e, TARGET), -EBUSY);
	moving_end(w);
}

static void only_a_slab_that_is_somewhere_migrates(void)
{
	struct world *w = world_moving(0, 1);

	CHECK_EQ(try_migrate(w, 1, TARGET), -EINVAL); /* UNMAPPED */
	CHECK_EQ(slab_of(w, 1).source_state, ISW_SLAB_UNMAPPED);
	CHECK_EQ(try_migrate(w, SLABS, TARGET), -EINVAL);
	CHECK_EQ(try_migrate(w, 0, 99), -EINVAL);
	CHECK_EQ(try_migrate(w, 0, THIRD), -EBUSY);
	CHECK_EQ(isw_slab_map(w->e, 0, THIRD, 0, 77), -EBUSY);
	get(w, 0, 1);
	leave(w);
	CHECK_EQ(slab_of(w, 0).source_state, ISW_SLAB_DRAINING);
	CHECK_EQ(try_migrate(w, 0, THIRD), -EBUSY); /* still in use */
	settle(w);
	put(w, 0, 1, 20);
	unmap(w);
	CHECK_EQ(slab_of(w, 0).state, ISW_SLAB_DRAINING);
	CHECK_EQ(try_migrate(w, 0, THIRD), -EINVAL);
	moving_end(w);
}

static void a_donor_that_is_down_is_no_target(void)
{
	struct world *w = world_new(0);

	for (uint32_t remote = SOURCE; remote <= TARGET; remote++)
		CHECK_EQ(remote_new(w), remote);
	map(w, 0, SOURCE);
	BREAK(w, TARGET);
	CHECK_EQ(try_migrate(w, 0, TARGET), -ENOTCONN);
	CHECK_EQ(try_migrate(w, 0, THIRD), -ENOTCONN); /* there never was one */
	CHECK_EQ(slab_of(w, 0).remote, SOURCE);
	write_settled(w, 0, 1, 10);
	CHECK(is_at(w, 0, SOURCE));
	/* Away from a donor that is down, though, is what it may be for. */
	reconnect(w, TARGET);
	BREAK(w, SOURCE);
	migrate(w, 0, TARGET);
	CHECK_EQ(slab_of(w, 0).source_state, ISW_SLAB_SUSPENDED);
	CHECK_EQ(pull(w), -ESTALE);
	write_settled(w, 1, 1, 11);
	CHECK(is_at(w, 1, TARGET));
	CHECK_EQ(read_settled(w, 0), 10);
	reconnect(w, SOURCE);
	resume_source(w);
	CHECK_EQ(pull(w), 0);
	settle(w);
	CHECK(is_at(w, 0, TARGET));
	moving_end(w);
}

/* Each donor counts its own. */
static void two_donors_may_have_the_same_generation(void)
{
	struct world *w = world_new(0);
	uint32_t pages;

	for (uint32_t remote = SOURCE; remote <= TARGET; remote++)
		CHECK_EQ(remote_new(w), remote);
	CHECK_EQ(isw_slab_map(w->e, 0, SOURCE, 0, 7), 0);
	write_settled(w, 0, 3, 10);
	CHECK_EQ(isw_slab_migrate(w->e, 0, TARGET, 0, 7), 0);
	write_settled(w, 0, 1, 20);
	CHECK_EQ(isw_slab_pages_at(w->e, 0, SOURCE, 7, &pages), 0);
	CHECK_EQ(pages, 2);
	CHECK_EQ(isw_slab_pages_at(w->e, 0, TARGET, 7, &pages), 1);
	CHECK_EQ(pages, 1);
	CHECK_EQ(isw_slab_unmap(w->e, 0, SOURCE, 7), 0);
	reap(w);
	drained(w, SOURCE, 7);
	CHECK(is_at(w, 0, TARGET) && !is_remote_valid(w, 1));
	/* It has been there, and is not. */
	CHECK_EQ(isw_slab_unmap(w->e, 0, SOURCE, 7), -EINVAL);
	CHECK_EQ(isw_slab_pages_at(w->e, 0, SOURCE, 7, &pages), -ESTALE);
	CHECK_EQ(slab_of(w, 0).state, ISW_SLAB_MAPPED);
	/* And comes back: the place that it has is meant, not the one that it had. */
	CHECK_EQ(isw_slab_migrate(w->e, 0, SOURCE, 0, 7), 0);
	CHECK_EQ(isw_slab_unmap(w->e, 0, TARGET, 7), 0);
	CHECK_EQ(isw_slab_migrate(w->e, 0, SOURCE, 1, 7), 0);
	CHECK_EQ(isw_slab_unmap(w->e, 0, SOURCE, 7), 0);
	CHECK_EQ(slab_of(w, 0).state, ISW_SLAB_UNMAPPED);
	CHECK_EQ(isw_slab_unmap(w->e, 0, SOURCE, 7), 0);
	CHECK_EQ(slab_of(w, 0).source_state, ISW_SLAB_UNMAPPED);
	CHECK_EQ(isw_slab_unmap(w->e, 0, SOURCE, 7), -EINVAL);
	moving_end(w);
}

static void each_place_has_its_own_slot(void)
{
	struct world *w = world_new(0);

	for (uint32_t remote = SOURCE; remote <= TARGET; remote++)
		CHECK_EQ(remote_new(w), remote);
	CHECK_EQ(isw_slab_map(w->e, 0, SOURCE, 3, 1), 0);
	write_settled(w, 0, 3, 10);
	put(w, 0, 1, 20);
	CHECK_EQ(isw_slab_migrate(w->e, 0, TARGET, 2, 2), 0);
	settle(w);
	put(w, 1, 1, 31);
	settle(w);
	CHECK_EQ(donor_value(w, SOURCE, 3 * SLAB_PAGES), 20);
	CHECK_EQ(donor_value(w, TARGET, 2 * SLAB_PAGES + 1), 31);
	CHECK_EQ(read_settled(w, 0), 20);
	CHECK_EQ(read_settled(w, 1), 31);
	CHECK_EQ(read_settled(w, 2), 12);
	CHECK_EQ(pull(w), 0);
	settle(w);
	source_is(w, 0, 0);
	CHECK_EQ(donor_value(w, TARGET, 2 * SLAB_PAGES), 20);
	CHECK_EQ(donor_value(w, TARGET, 2 * SLAB_PAGES + 2), 12);
	CHECK_EQ(stats_of(w).crc_errors_remote, 0);
	CHECK_EQ(stats_of(w).pages_in_remote, 3);
	moving_end(w);
}

/* ------------------------------------------------------------------------- reads */

static void a_page_is_read_where_it_is(void)
{
	struct world *w = world_moving(0, 8);
	uint32_t id;

	write_settled(w, 2, 2, 102);
	write_settled(w, 7, 1, 107);
	id = get(w, 0, 8);
	CHECK_EQ(sent(w, SOURCE), 2); /* 0 and 1, 4 to 6 */
	CHECK_EQ(sent(w, TARGET), 2); /* 2 and 3, 7 */
	CHECK_EQ(w->e->sim->donors[SOURCE]->pending[0].xfer->length, 2 * ISW_PAGE_BYTES);
	CHECK_EQ(w->e->sim->donors[SOURCE]->pending[1].xfer->length, 3 * ISW_PAGE_BYTES);
	CHECK_EQ(w->e->sim->donors[TARGET]->pending[0].xfer->length, 2 * ISW_PAGE_BYTES);
	CHECK_EQ(slab_of(w, 0).in_flight, 2);
	CHECK_EQ(slab_of(w, 0).source_in_flight, 2);
	settle(w);
	for (uint64_t page = 0; page < 8; page++)
		CHECK_EQ(w->got[id][page],
			 page == 2 || page == 3 || page == 7 ? 100 + page : 10 + page);
	CHECK_EQ(stats_of(w).pages_in_remote, 8);
	CHECK_EQ(stats_of(w).crc_errors_remote, 0);
	moving_end(w);
}

static void a_source_that_refuses_is_passed_by(void)
{
	struct world *w = world_moving(0, 2);
	uint32_t id = get(w, 0, 1);

	REFUSE(w, SOURCE, 0);
	CHECK_EQ(w->events[ISW_EVENT_SLAB_ERROR], 1);
	CHECK_EQ(w->last[ISW_EVENT_SLAB_ERROR].remote, SOURCE);
	CHECK_EQ(w->last[ISW_EVENT_SLAB_ERROR].generation, 1);
	settle(w);
	CHECK_EQ(w->got[id][0], 10);
	CHECK_EQ(stats_of(w).pages_in_backup, 1);
	moving_end(w);
}

static void a_source_that_lies_is_not_believed(void)
{
	struct world *w = world_moving(0, 2);
	uint32_t id = get(w, 0, 1);

	CORRUPT(w, SOURCE, 0);
	CORRUPT(w, SOURCE, 0);
	CHECK_EQ(w->events[ISW_EVENT_BAD_PAGE], 1);
	CHECK_EQ(w->last[ISW_EVENT_BAD_PAGE].remote, SOURCE);
	CHECK(!is_remote_valid(w, 0) && is_at(w, 1, SOURCE));
	settle(w);
	CHECK_EQ(w->got[id][0], 10);
	CHECK_EQ(stats_of(w).pages_in_backup, 1);
	moving_end(w);
}

/* What the old donor said of it says nothing of what the new one has. */
static void a_page_that_moves_while_the_source_lies_is_believed(void)
{
	struct world *w = world_moving(0, 1);
	uint32_t id = get(w, 0, 1);

	CORRUPT(w, SOURCE, 0); /* it is read once more */
	CHECK_EQ(pull(w), 0);
	REPLY(w, SOURCE, 1);
	REPLY(w, TARGET, 0);
	CHECK(is_at(w, 0, TARGET));
	CORRUPT(w, SOURCE, 0);
	CHECK(is_at(w, 0, TARGET));
	CHECK_EQ(w->events[ISW_EVENT_BAD_PAGE], 0);
	settle(w);
	CHECK_EQ(w->got[id][0], 10);
	moving_end(w);
}

/* The source failed a read; by then its page is at the target. */
static void a_read_that_the_source_fails_finds_what_was_pulled(uint32_t flags)
{
	struct world *w = world_moving(flags, 1);
	uint32_t id = get(w, 0, 1);

	CHECK_EQ(pull(w), 0);
	REPLY(w, SOURCE, 1);
	REPLY(w, TARGET, 0);
	CHECK(is_at(w, 0, TARGET));
	REFUSE(w, SOURCE, 0);
	CHECK_EQ(sent_for(w, TARGET, 0, ISWI_XFER_READ), 1);
	REPLY(w, TARGET, 0);
	CHECK_EQ(w->error[id], 0);
	CHECK_EQ(w->got[id][0], 10);
	moving_end(w);
}

/* ------------------------------------------------------------------------ writes */

static void writes_go_to_the_new_place_only(void)
{
	struct world *w = world_moving(0, 4);

	put(w, 1, 2, 101);
	CHECK_EQ(sent(w, SOURCE), 0);
	CHECK_EQ(sent(w, TARGET), 1);
	CHECK(!is_remote_valid(w, 1) && !is_remote_valid(w, 2)); /* R2 */
	source_is(w, 2, 0);
	settle(w);
	CHECK(is_at(w, 0, SOURCE) && is_at(w, 1, TARGET));
	CHECK(is_at(w, 2, TARGET) && is_at(w, 3, SOURCE));
	CHECK_EQ(donor_value(w, SOURCE, 1), 11); /* nobody reads it any more */
	CHECK_EQ(donor_value(w, TARGET, 1), 101);
	CHECK_EQ(slab_of(w, 0).remote_valid_pages, 4);
	moving_end(w);
}

static void an_older_write_counts_where_it_went(void)
{
	struct world *w = world_new(0);
	uint32_t id;

	for (uint32_t remote = SOURCE; remote <= TARGET; remote++)
		CHECK_EQ(remote_new(w), remote);
	map(w, 0, SOURCE);
	id = put(w, 0, 2, 10);
	migrate(w, 0, TARGET);
	source_is(w, 0, 1);
	REPLY(w, SOURCE, 0);
	CHECK_EQ(w->error[id], 0);
	CHECK(is_at(w, 0, SOURCE) && is_at(w, 1, SOURCE));
	source_is(w, 2, 0);
	CHECK_EQ(read_settled(w, 1), 11);
	CHECK_EQ(pull(w), 0);
	settle(w);
	CHECK(is_at(w, 0, TARGET) && is_at(w, 1, TARGET));
	source_is(w, 0, 0);
	moving_end(w);
}

/* Donor 0 has slab 0, and a write of page 0 is on its way there, which holds 20. */
static struct world *world_writing(uint32_t flags)
{
	struct isw_engine_config config = world_config(flags);
	struct world *w = world_of_three(&config);

	map(w, 0, SOURCE);
	write_settled(w, 0, 2, 10);
	put(w, 0, 1, 20);
	migrate(w, 0, TARGET);
	return w;
}

static void newer_data_waits_and_goes_to_the_new_place(void)
{
	struct world *w = world_writing(0);
	uint32_t id = put(w, 0, 1, 30);

	CHECK_EQ(sent_for(w, SOURCE, 0, ISWI_XFER_WRITE), 1);
	CHECK_EQ(sent(w, TARGET), 0); /* R3 */
	REPLY(w, SOURCE, 0);
	CHECK(!is_remote_valid(w, 0));
	CHECK_EQ(sent(w, SOURCE), 0);
	CHECK_EQ(sent_for(w, TARGET, 0, ISWI_XFER_WRITE), 1);
	CHECK_EQ(slab_of(w, 0).source_in_flight, 0);
	CHECK_EQ(slab_of(w, 0).in_flight, 1);
	CHECK_EQ(w->error[id], PENDING);
	REPLY(w, TARGET, 0);
	CHECK_EQ(w->error[id], 0);
	CHECK(is_at(w, 0, TARGET) && is_at(w, 1, SOURCE));
	CHECK_EQ(donor_value(w, TARGET, 0), 30);
	CHECK_EQ(read_settled(w, 0), 30);
	moving_end(w);
}

static void newer_data_waits_for_an_old_place_that_drains(void)
{
	struct world *w = world_writing(0);
	uint32_t id = put(w, 0, 1, 30);

	leave(w);
	not_drained(w);
	CHECK_EQ(sent(w, TARGET), 0);
	REPLY(w, SOURCE, 0);
	drained(w, SOURCE, 1);
	CHECK_EQ(sent_for(w, TARGET, 0, ISWI_XFER_WRITE), 1);
	REPLY(w, TARGET, 0);
	CHECK_EQ(w->error[id], 0);
	CHECK(is_at(w, 0, TARGET) && !is_remote_valid(w, 1));
	CHECK_EQ(read_settled(w, 0), 30);
	moving_end(w);
}

static void newer_data_waits_for_an_old_place_that_breaks(void)
{
	struct world *w = world_writing(0);
	uint32_t id = put(w, 0, 1, 30);

	BREAK(w, SOURCE);
	CHECK_EQ(sent_for(w, TARGET, 0, ISWI_XFER_WRITE), 1);
	REPLY(w, TARGET, 0);
	CHECK_EQ(w->error[id], 0);
	/* What was cut off may land when the page is long elsewhere. */
	CHECK_EQ(step(w, ISW_STEP_REMOTE_LATE, SOURCE, 0), 1);
	CHECK_EQ(donor_value(w, SOURCE, 0), 20);
	reconnect(w, SOURCE);
	resume_source(w);
	CHECK(is_at(w, 0, TARGET) && is_at(w, 1, SOURCE));
	CHECK_EQ(read_settled(w, 0), 30);
	CHECK_EQ(read_settled(w, 1), 11);
	CHECK_EQ(stats_of(w).crc_errors_remote, 0);
	moving_end(w);
}

/* The new place is gone, or going, when the older write ends: newer data has nowhere to go. */
static void newer_data_finds_the_new_place(bool draining, bool source_too)
{
	struct world *w = world_writing(0);
	uint64_t generation = slab_of(w, 0).generation;
	uint32_t id = put(w, 0, 1, 30), read = 0;

	if (draining) {
		put(w, 1, 1, 40); /* keeps the place in use */
		unmap(w);
		not_drained(w);
	} else {
		BREAK(w, TARGET);
	}
	if (source_too) {
		read = get(w, 1, 1);
		leave(w);
	}
	REPLY(w, SOURCE, 0);
	CHECK_EQ(sent_for(w, SOURCE, 0, ISWI_XFER_WRITE), 0);
	CHECK_EQ(sent_for(w, TARGET, 0, ISWI_XFER_WRITE), 0);
	CHECK(!is_remote_valid(w, 0));
	CHECK_EQ(w->error[id], PENDING);
	/* Whoever looked whether it could be sent there has no use of it any more. */
	CHECK_EQ(slab_of(w, 0).in_flight, draining);
	if (draining) {
		CHECK_EQ(slab_of(w, 0).state, ISW_SLAB_DRAINING);
		REPLY(w, TARGET, 0);
		CHECK_EQ(slab_of(w, 0).state, ISW_SLAB_UNMAPPED);
	}
	settle(w);
	CHECK_EQ(w->events[ISW_EVENT_SLAB_DRAINED], (uint32_t)draining + source_too);
	if (draining && !source_too)
		drained(w, TARGET, generation);
	if (source_too)
		CHECK_EQ(w->got[read][0], draining ? 40 : 11);
	CHECK_EQ(w->error[id], 0);
	CHECK_EQ(read_settled(w, 0), 30);
	moving_end(w);
}

/* The place that was current when it was sent has become the source. */
static void a_place_is_the_same_whatever_it_is_to_the_slab(void)
{
	struct world *w = world_moving(0, 0);
	uint32_t id = put(w, 0, 1, 10);

	leave(w); /* nothing is there */
	migrate(w, 0, THIRD);
	REPLY(w, TARGET, 0);
	CHECK_EQ(w->error[id], 0);
	CHECK(is_at(w, 0, TARGET));
	source_is(w, 1, 0);
	settle(w);
	CHECK_EQ(pull(w), 0);
	settle(w);
	CHECK(is_at(w, 0, THIRD));
	CHECK_EQ(donor_value(w, THIRD, 0), 10);
	moving_end(w);
}

/* ------------------------------------------------------------------------ pulling */

static void a_pull_brings_everything(void)
{
	struct world *w = world_moving(0, SLAB_PAGES);
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
	moving_end(w);
}

static void only_a_slab_at_both_ends_is_pulled(void)
{
	struct world *w = world_moving(0, 2);
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
	reconnect(w, TARGET);
	resume(w, 0);
	get(w, 0, 1);
	leave(w);
	CHECK_EQ(slab_of(w, 0).source_state, ISW_SLAB_DRAINING);
	CHECK_EQ(pull(w), -ESTALE);
	settle(w);
	CHECK_EQ(pull(w), -ESTALE);
	CHECK_EQ(slab_of(w, 0).in_flight + slab_of(w, 0).source_in_flight, 0);
	moving_end(w);
}

static void a_pulled_page_is_at_the_source_until_the_acknowledgement(void)
{
	struct world *w = world_pulling(0, READING, 2);
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
	moving_end(w);
}

static void a_page_with_a_write_in_flight_is_passed_over(void)
{
	struct world *w = world_writing(0); /* page 0, at the source */

	CHECK_EQ(pull(w), 0);
	CHECK_EQ(sent_for(w, SOURCE, 0, ISWI_XFER_READ), 0);
	CHECK_EQ(sent_for(w, SOURCE, 1, ISWI_XFER_READ), 1);
	settle(w);
	migrated(w, 1, 0);
	source_is(w, 1, 0);
	/* A second pass finds it. */
	CHECK_EQ(pull(w), 0);
	CHECK_EQ(sent(w, SOURCE), 0);
	CHECK_EQ(pull_slab(w, 0, 1), 0);
	settle(w);
	migrated(w, 2, 0);
	source_is(w, 0, 0);
	CHECK_EQ(donor_value(w, TARGET, 0), 20);
	moving_end(w);
}

static void a_page_is_pulled_once(void)
{
	struct world *w = world_pulling(0, READING, 3);

	for (int i = 0; i < 3; i++)
		CHECK_EQ(pull_slab(w, 0, 1), 0);
	CHECK_EQ(sent(w, SOURCE), 1);
	REPLY(w, SOURCE, 0);
	CHECK_EQ(pull_slab(w, 0, 1), 0);
	CHECK_EQ(sent(w, SOURCE), 0);
	CHECK_EQ(sent(w, TARGET), 1);
	settle(w);
	migrated(w, 3, 0);
	moving_end(w);
}

/* ----------------------------------------------------------- what comes between wins */

static void a_write_wins(enum stage stage)
{
	struct world *w = world_pulling(0, stage, 1);
	uint32_t id = put(w, 0, 1, 99);

	/* Its own transfer waits only for one that is on its way there. */
	CHECK_EQ(sent_for(w, TARGET, 0, ISWI_XFER_WRITE), 1);
	CHECK(!is_remote_valid(w, 0));
	source_is(w, 0, stage == READING);
	pull_goes_on(w, stage);
	migrated(w, 0, 1);
	CHECK(!is_remote_valid(w, 0));
	CHECK_EQ(w->error[id], PENDING);
	CHECK_EQ(sent_for(w, TARGET, 0, ISWI_XFER_WRITE), 1);
	REPLY(w, TARGET, 0);
	CHECK_EQ(w->error[id], 0);
	CHECK(is_at(w, 0, TARGET));
	CHECK_EQ(donor_value(w, TARGET, 0), 99);
	source_is(w, 0, 0);
	CHECK_EQ(read_settled(w, 0), 99);
	moving_end(w);
}

/* Nothing of the write is left to be seen when the pull goes on, but for the page's version. */
static void a_write_that_is_all_over_wins(void)
{
	struct world *w = world_pulling(0, READING, 1);
	uint32_t id = put(w, 0, 1, 99);

	REPLY(w, TARGET, 0);
	DISK_TAKE(w);
	DISK_DONE(w, 0);
	CHECK_EQ(w->error[id], 0);
	CHECK(is_at(w, 0, TARGET));
	REPLY(w, SOURCE, 0);
	migrated(w, 0, 1);
	CHECK_EQ(sent(w, TARGET), 0);
	CHECK_EQ(donor_value(w, TARGET, 0), 99);
	CHECK_EQ(read_settled(w, 0), 99);
	moving_end(w);
}

/* The same bytes, so that no checksum tells, and a donor that refused them. */
static void a_write_of_the_same_bytes_wins(void)
{
	struct world *w = world_pulling(0, READING, 1);

	put(w, 0, 1, 10);
	REFUSE(w, TARGET, 0);
	REPLY(w, SOURCE, 0);
	migrated(w, 0, 1);
	CHECK_EQ(sent(w, TARGET), 0);
	settle(w);
	CHECK(!is_remote_valid(w, 0));
	CHECK_EQ(read_settled(w, 0), 10);
	moving_end(w);
}

static void zeros_win(enum stage stage, uint32_t op)
{
	struct world *w = world_pulling(0, stage, 1);
	uint32_t id = submit(w, op, 0, 1, 0);

	CHECK_EQ(w->error[id], 0);
	source_is(w, 0, stage == READING);
	pull_goes_on(w, stage);
	migrated(w, 0, 1);
	CHECK(!is_remote_valid(w, 0) && !is_backup_current(w, 0));
	source_is(w, 0, 0);
	CHECK_EQ(read_settled(w, 0), 0);
	CHECK_EQ(stats_of(w).staging_pages_used, 0);
	moving_end(w);
}

static void a_write_after_zeros_wins(enum stage stage)
{
	struct world *w = world_pulling(0, stage, 1);

	trim(w, 0, 1);
	put(w, 0, 1, 99);
	CHECK_EQ(sent_for(w, TARGET, 0, ISWI_XFER_WRITE), 1);
	pull_goes_on(w, stage);
	migrated(w, 0, 1);
	CHECK(!is_remote_valid(w, 0));
	settle(w);
	CHECK_EQ(donor_value(w, TARGET, 0), 99);
	CHECK_EQ(read_settled(w, 0), 99);
	moving_end(w);
}

static void the_rest_of_a_run_is_pulled(void)
{
	struct world *w = world_pulling(0, READING, 6);

	trim(w, 1, 1);
	REPLY(w, SOURCE, 0);
	CHECK_EQ(sent(w, TARGET), 2);
	put(w, 4, 1, 99);
	settle(w);
	migrated(w, 4, 2);
	for (uint64_t page = 0; page < 6; page++) {
		CHECK_EQ(is_at(w, page, TARGET), page != 1);
		CHECK_EQ(read_settled(w, page), page == 1 ? 0 : page == 4 ? 99 : 10 + page);
	}
	source_is(w, 0, 0);
	moving_end(w);
}

/* ----------------------------------------------------------------- the source is bad */

static void a_source_that_refuses_keeps_its_pages(void)
{
	struct world *w = world_pulling(0, READING, 3);

	REFUSE(w, SOURCE, 0);
	migrated(w, 0, 3);
	CHECK_EQ(w->events[ISW_EVENT_SLAB_ERROR], 1);
	CHECK_EQ(w->last[ISW_EVENT_SLAB_ERROR].remote, SOURCE);
	CHECK_EQ(sent(w, SOURCE) + sent(w, TARGET), 0);
	CHECK_EQ(stats_of(w).staging_pages_used, 0);
	CHECK_EQ(stats_of(w).crc_errors_remote, 0); /* nothing was looked at */
	source_is(w, 3, 0);
	CHECK_EQ(read_settled(w, 2), 12);
	CHECK_EQ(stats_of(w).pages_in_remote, 1);
	CHECK_EQ(pull_slab(w, 0, 1), 0);
	settle(w);
	migrated(w, 3, 3);
	moving_end(w);
}

/* A donor that refuses, either of them, is not asked for all the rest. */
static void a_pull_ends_with_its_errors(enum stage stage)
{
	struct world *w = world_large(512, 64);

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
	moving_end(w);
}

static void wrong_bytes_are_not_pulled(void)
{
	struct world *w = world_moving(0, 3);
	unsigned char *byte = w->e->sim->donors[SOURCE]->memory + ISW_PAGE_BYTES + 7;

	*byte ^= 1;
	CHECK_EQ(pull(w), 0);
	settle(w);
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
	CHECK_EQ(pull_slab(w, 0, 1), 0);
	settle(w);
	CHECK(is_at(w, 1, TARGET));
	moving_end(w);
}

static void a_source_that_breaks(enum stage stage)
{
	struct world *w = world_pulling(0, stage, 2);

	BREAK(w, SOURCE);
	CHECK_EQ(slab_of(w, 0).state, ISW_SLAB_MAPPED);
	CHECK_EQ(slab_of(w, 0).source_state, ISW_SLAB_SUSPENDED);
	if (stage == READING) {
		migrated(w, 0, 2);
		source_is(w, 2, 0); /* bits are kept */
		CHECK_EQ(read_settled(w, 0), 10);
		CHECK_EQ(stats_of(w).pages_in_backup, 1);
		reconnect(w, SOURCE);
		CHECK_EQ(slab_of(w, 0).source_state, ISW_SLAB_SUSPENDED);
		resume_source(w);
		CHECK_EQ(read_settled(w, 0), 10);
		CHECK_EQ(stats_of(w).pages_in_backup, 1);
		CHECK_EQ(pull_slab(w, 0, 1), 0);
		settle(w);
		migrated(w, 2, 2);
	} else {
		/* What was read is pulled all the same. */
		REPLY(w, TARGET, 0);
		migrated(w, 2, 0);
	}
	CHECK(is_at(w, 0, TARGET) && is_at(w, 1, TARGET));
	source_is(w, 0, 0);
	moving_end(w);
}

static void a_source_that_broke_is_given_up(void)
{
	struct world *w = world_moving(0, 2);

	write_settled(w, 1, 1, 21);
	CHECK_EQ(pull(w), 0);
	CHECK_EQ(sent(w, SOURCE), 1);
	BREAK(w, SOURCE);
	leave(w);
	drained(w, SOURCE, 1);
	CHECK_EQ(slab_of(w, 0).source_state, ISW_SLAB_UNMAPPED);
	CHECK_EQ(slab_of(w, 0).remote_valid_pages, 1);
	CHECK_EQ(read_settled(w, 0), 10);
	CHECK_EQ(stats_of(w).pages_in_backup, 1);
	CHECK_EQ(read_settled(w, 1), 21);
	CHECK_EQ(stats_of(w).pages_in_backup, 1);
	moving_end(w);
}

static void a_source_is_drained_after_its_last_transfer(void)
{
	struct world *w = world_pulling(0, READING, 2);
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
	moving_end(w);
}

/* Nothing new is sent there, nor is what is under way begun anew. */
static void a_pull_does_not_go_on_at_a_source_that_drains(void)
{
	struct world *w = world_large(512, 64);

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
	moving_end(w);
}

/* ----------------------------------------------------------------- the target is bad */

static void a_target_that_refuses_has_nothing(void)
{
	struct world *w = world_pulling(0, WRITING, 2);

	REFUSE(w, TARGET, 0);
	migrated(w, 0, 2);
	CHECK(is_at(w, 0, SOURCE) && is_at(w, 1, SOURCE));
	CHECK_EQ(w->events[ISW_EVENT_SLAB_ERROR], 1);
	CHECK_EQ(w->last[ISW_EVENT_SLAB_ERROR].remote, TARGET);
	CHECK_EQ(w->last[ISW_EVENT_SLAB_ERROR].generation, 2);
	CHECK_EQ(stats_of(w).staging_pages_used, 0);
	CHECK_EQ(read_settled(w, 1), 11);
	CHECK_EQ(stats_of(w).pages_in_remote, 1);
	moving_end(w);
}

static void a_torn_page_is_not_pulled(void)
{
	struct world *w = world_pulling(0, WRITING, 1);

	CHECK_EQ(step(w, ISW_STEP_REMOTE_TEAR, TARGET, 0), 1);
	CHECK_EQ(donor_value(w, TARGET, 0), TORN);
	migrated(w, 0, 1);
	CHECK_EQ(slab_of(w, 0).state, ISW_SLAB_SUSPENDED);
	CHECK(is_at(w, 0, SOURCE));
	CHECK_EQ(read_settled(w, 0), 10);
	reconnect(w, TARGET);
	resume(w, 0);
	CHECK(is_at(w, 0, SOURCE));
	CHECK_EQ(pull_slab(w, 0, 1), 0);
	settle(w);
	migrated(w, 1, 1);
	CHECK(is_at(w, 0, TARGET));
	CHECK_EQ(read_settled(w, 0), 10);
	CHECK_EQ(stats_of(w).pages_in_remote, 2);
	CHECK_EQ(stats_of(w).crc_errors_remote, 0);
	moving_end(w);
}

/* Then the slab is nowhere, but for its source; and goes on to a third donor. */
static void a_target_that_is_lost(void)
{
	struct world *w = world_moving(0, 2);
	uint64_t generation = slab_of(w, 0).generation;
	uint32_t id;

	write_settled(w, 4, 1, 400);
	BREAK(w, TARGET);
	CHECK_EQ(slab_of(w, 0).state, ISW_SLAB_SUSPENDED);
	CHECK_EQ(read_settled(w, 4), 400);
	CHECK_EQ(stats_of(w).pages_in_backup, 1);
	unmap(w);
	drained(w, TARGET, generation);
	CHECK_EQ(slab_of(w, 0).state, ISW_SLAB_UNMAPPED);
	CHECK_EQ(slab_of(w, 0).source_state, ISW_SLAB_MAPPED);
	CHECK(!is_remote_valid(w, 4));
	CHECK_EQ(read_settled(w, 0), 10);
	CHECK_EQ(stats_of(w).pages_in_remote, 1);
	id = put(w, 5, 1, 500); /* the source gets nothing new */
	CHECK_EQ(sent(w, SOURCE), 0);
	settle(w);
	CHECK_EQ(w->error[id], 0);
	CHECK(!is_remote_valid(w, 5));
	map(w, 0, THIRD);
	write_settled(w, 6, 1, 600);
	CHECK(is_at(w, 6, THIRD));
	moving_end(w);
}

/* The same in the middle of a pull, which finds another donor where it was to go. */
static void a_pull_does_not_follow_its_slab(enum stage stage)
{
	struct world *w = world_pulling(0, stage, 2);
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
	CHECK_EQ(read_settled(w, 0), 10);
	CHECK_EQ(stats_of(w).pages_in_remote, 1);
	CHECK_EQ(pull_slab(w, 0, 1), 0);
	settle(w);
	migrated(w, 2, 2);
	CHECK(is_at(w, 0, THIRD) && is_at(w, 1, THIRD));
	CHECK_EQ(donor_value(w, THIRD, 1), 11);
	leave(w);
	CHECK_EQ(read_settled(w, 1), 11);
	CHECK_EQ(stats_of(w).pages_in_remote, 2);
	moving_end(w);
}

static void each_place_has_its_own_bits(bool source_first)
{
	struct world *w = world_moving(0, 4);

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
	moving_end(w);
}

/* ------------------------------------------------------------------ what is left there */

static void the_source_may_get_more_while_it_is_written(void)
{
	struct world *w = world_writing(0);
	struct isw_slab_info info = slab_of(w, 0);
	uint32_t pages = 99, read;

	source_is(w, 1, 1); /* page 1; page 0 is on its way */
	CHECK_EQ(isw_slab_pages_at(w->e, 0, info.remote, info.generation, &pages), 1);
	CHECK_EQ(pages, 0);
	REPLY(w, SOURCE, 0);
	source_is(w, 2, 0);
	write_settled(w, 0, 2, 30);
	source_is(w, 0, 0);
	CHECK_EQ(isw_slab_pages_at(w->e, 0, info.remote, info.generation, &pages), 1);
	CHECK_EQ(pages, 2);
	CHECK_EQ(isw_slab_pages_at(w->e, 0, SOURCE, info.generation, &pages), -ESTALE);
	CHECK_EQ(isw_slab_pages_at(w->e, 0, TARGET, info.generation - 1, &pages), -ESTALE);
	CHECK_EQ(isw_slab_pages_at(w->e, 1, SOURCE, 1, &pages), -ESTALE);
	CHECK_EQ(isw_slab_pages_at(w->e, SLABS, SOURCE, 1, &pages), -EINVAL);
	CHECK_EQ(isw_slab_pages_at(w->e, 0, 99, 1, &pages), -EINVAL);
	read = get(w, 0, 1);
	leave(w);
	CHECK_EQ(isw_slab_pages_at(w->e, 0, TARGET, info.generation, &pages), 1);
	settle(w);
	CHECK_EQ(w->got[read][0], 30);
	CHECK_EQ(isw_slab_pages_at(w->e, 0, SOURCE, info.source_generation, &pages), -ESTALE);
	moving_end(w);
}

/* Copies from the disk are under way when the slab migrates: they may not go where it was (R8). */
static void a_fill_does_not_go_to_the_source(void)
{
	struct world *w = world_new(0);
	uint32_t next;

	write_settled(w, 0, 2, 10);
	for (uint32_t remote = SOURCE; remote <= TARGET; remote++)
		CHECK_EQ(remote_new(w), remote);
	map(w, 0, SOURCE);
	CHECK_EQ(isw_slab_fill(w->e, 0, slab_of(w, 0).generation, 0, 9, &next), 2);
	DISK_TAKE_READ(w);
	migrate(w, 0, TARGET);
	source_is(w, 0, 0); /* and that is final */
	DISK_DONE(w, 0);
	CHECK_EQ(sent(w, SOURCE) + sent(w, TARGET), 0);
	source_is(w, 0, 0);
	CHECK_EQ(stats_of(w).pages_copy_dropped, 2);
	CHECK_EQ(isw_slab_fill(w->e, 0, slab_of(w, 0).generation, 0, 9, &next), 2);
	settle(w);
	CHECK(is_at(w, 0, TARGET) && is_at(w, 1, TARGET));
	moving_end(w);
}

static void fill_and_pull_go_side_by_side(void)
{
	struct world *w = world_new(0);
	uint32_t next;

	write_settled(w, 0, 6, 10);
	for (uint32_t remote = SOURCE; remote <= TARGET; remote++)
		CHECK_EQ(remote_new(w), remote);
	map(w, 0, SOURCE);
	write_settled(w, 2, 2, 22);
	migrate(w, 0, TARGET);
	CHECK_EQ(isw_slab_fill(w->e, 0, slab_of(w, 0).generation, 0, 9, &next), 4);
	CHECK_EQ(pull(w), 0);
	CHECK_EQ(sent(w, SOURCE), 1);
	settle(w);
	CHECK_EQ(stats_of(w).pages_migrated, 2);
	CHECK_EQ(stats_of(w).pages_copied, 4);
	CHECK_EQ(stats_of(w).pages_copy_dropped, 0);
	for (uint64_t page = 0; page < 6; page++) {
		uint64_t value = (page == 2 || page == 3 ? 20 : 10) + page;

		CHECK(is_at(w, page, TARGET));
		CHECK_EQ(donor_value(w, TARGET, page), value);
	}
	source_is(w, 0, 0);
	moving_end(w);
}

/* ----------------------------------------------------- slabs, groups, and their borders */

static void the_slab_next_to_it_is_left_alone(void)
{
	struct world *w = world_moving(0, SLAB_PAGES);

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
	moving_end(w);
}

/* One pull for all, which does one slab after the other. */
static void slabs_are_pulled_in_turn(void)
{
	struct world *w = world_moving(0, SLAB_PAGES);

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
	moving_end(w);
}

static void a_slab_that_migrates_again_is_pulled_from_its_start(void)
{
	struct world *w = world_moving(0, 3);

	CHECK_EQ(pull(w), 0);
	settle(w);
	leave(w);
	migrate(w, 0, THIRD);
	CHECK_EQ(pull(w), 0); /* nobody said `again`: this pass is the first */
	CHECK_EQ(sent(w, TARGET), 1);
	settle(w);
	migrated(w, 6, 0);
	CHECK(is_at(w, 0, THIRD) && is_at(w, 2, THIRD));
	moving_end(w);
}

/* Slabs that begin and end within a group of the bitmaps, and a last one cut short. */
static void every_page_of_any_slab_is_pulled(uint32_t slab_pages)
{
	struct isw_engine_config config = world_config(0);
	uint32_t pages = SLABS * slab_pages - slab_pages / 2;
	struct world *w;

	config.slab_bytes = slab_pages * ISW_PAGE_BYTES;
	config.size_bytes = pages * ISW_PAGE_BYTES;
	config.staging_pages = 4 * slab_pages + 16;
	w = world_of_three(&config);
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
	moving_end(w);
}

/* ------------------------------------------------------------- the copies' share, used up */

static void a_pull_sets_its_own_pace(void)
{
	struct world *w = world_large(1024, 1024);
	uint32_t under_way = 0;

	CHECK_EQ(pull(w), 1);
	CHECK_EQ(sent(w, SOURCE), 8);
	for (uint32_t i = 0; i < 8; i++)
		CHECK_EQ(w->e->sim->donors[SOURCE]->pending[i].xfer->length, 32 * ISW_PAGE_BYTES);
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
	moving_end(w);
}

/* Pages that cannot be pulled just now do not end it for the others. */
static void a_pull_goes_on_past_what_it_drops(void)
{
	struct world *w = world_large(1024, 1024);

	CHECK_EQ(pull(w), 1);
	trim(w, 0, 256); /* all that is under way */
	settle(w);
	migrated(w, 1024 - 256, 256);
	source_is(w, 0, 0);
	moving_end(w);
}

static void a_second_pass_finds_what_the_first_left(void)
{
	struct world *w = world_large(512, 64);
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
	moving_end(w);
}

static void a_pull_without_buffers_goes_on_when_asked_again(void)
{
	struct world *w = world_large(512, 64);
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
	moving_end(w);
}

/* A write that found no buffer goes on as soon as a pull gives some back, however it ends. */
static void writes_go_on_with_the_buffers_of_a_pull(void)
{
	for (int way = 0; way < 3; way++) {
		struct world *w = world_pulling(0, READING, SLAB_PAGES);
		uint32_t id;

		put(w, SLAB_PAGES, 8, 100);
		id = put(w, 2 * SLAB_PAGES, 8, 200);
		CHECK_EQ(stats_of(w).staging_waits, 1);
		if (way == 0) {
			REFUSE(w, SOURCE, 0);
		} else {
			REPLY(w, SOURCE, 0);
			if (way == 1)
				REPLY(w, TARGET, 0);
			else
				REFUSE(w, TARGET, 0);
		}
		CHECK_EQ(stats_of(w).pages_out, SLAB_PAGES + 16);
		settle(w);
		CHECK_EQ(w->error[id], 0);
		CHECK_EQ(read_settled(w, 2 * SLAB_PAGES), 200);
		moving_end(w);
	}
}

/* -------------------------------------------------------------- hedges, flushes, the end */

static struct world *world_hedging(void)
{
	struct isw_engine_config config = world_config(0);
	struct world *w;

	config.staging_pages = 64;
	config.hedge_us_min = 5000;
	w = world_of_three(&config);
	map(w, 0, SOURCE);
	write_settled(w, 0, SLAB_PAGES, 10);
	migrate(w, 0, TARGET);
	return w;
}

#define SLOW(w, r, n) CHECK_EQ(step(w, ISW_STEP_REMOTE_SLOW, r, n), 1)

static unsigned int owed(const struct world *w, uint32_t remote)
{
	return atomic_load(&w->e->remotes[remote].hedges);
}

static void a_read_of_the_source_is_hedged(void)
{
	struct world *w = world_hedging();
	uint32_t id = get(w, 0, 2);

	SLOW(w, SOURCE, 0);
	CHECK_EQ(owed(w, SOURCE), 1);
	CHECK_EQ(owed(w, TARGET), 0);
	leave(w);
	DISK_TAKE_READ(w);
	DISK_DONE(w, 0);
	CHECK_EQ(w->error[id], 0);
	CHECK_EQ(w->got[id][1], 11);
	not_drained(w); /* the donor may still write into our buffers */
	CHECK_EQ(slab_of(w, 0).source_in_flight, 1);
	REPLY(w, SOURCE, 0);
	drained(w, SOURCE, 1);
	CHECK_EQ(owed(w, SOURCE), 0);
	CHECK_EQ(owed(w, TARGET), 0);
	moving_end(w);
}

static void a_source_that_hangs_is_passed_by(void)
{
	struct world *w = world_hedging();
	uint32_t id;

	write_settled(w, 0, 1, 20);
	for (uint32_t i = 0; i < ISWI_HEDGES_MAX; i++) {
		get(w, 1, 1);
		SLOW(w, SOURCE, i);
	}
	disk_settle(w);
	CHECK_EQ(owed(w, SOURCE), ISWI_HEDGES_MAX);
	id = get(w, 0, 3);
	CHECK_EQ(sent(w, SOURCE), ISWI_HEDGES_MAX);
	CHECK_EQ(sent_for(w, TARGET, 0, ISWI_XFER_READ), 1); /* which does not hang */
	REPLY(w, TARGET, 0);
	disk_settle(w);
	CHECK_EQ(w->error[id], 0);
	CHECK_EQ(w->got[id][0], 20);
	CHECK_EQ(w->got[id][2], 12);
	moving_end(w);
}

static void a_pull_is_nothing_to_wait_for(enum stage stage)
{
	struct world *w = world_pulling(0, stage, 1);
	struct isw_error error = {0};
	char path[64];
	uint32_t id;

	snprintf(path, sizeof(path), "isw-migrate-%d.tables", (int)getpid());
	CHECK_EQ(isw_engine_settle(w->e, 0), 0);
	CHECK_EQ(isw_engine_save_tables(w->e, path, &error), 0);
	unlink(path);
	id = flush(w);
	DISK_TAKE(w);
	DISK_DONE(w, 0); /* the sync */
	CHECK_EQ(w->error[id], 0);
	/* What is written meanwhile is. */
	put(w, 0, 1, 99);
	CHECK_EQ(isw_engine_settle(w->e, 0), -ETIMEDOUT);
	settle(w);
	CHECK_EQ(isw_engine_settle(w->e, 0), 0);
	moving_end(w);
}

static void an_engine_may_end_in_the_middle_of_it(enum stage stage)
{
	struct world *w = world_pulling(0, stage, 3);

	isw_engine_destroy(w->e);
	free(w);
}

/* --------------------------------------------------------- a reader that is interrupted */

/*
 * A thread that is held after it has looked where the slab is, before it looks where a page is: by
 * the lock of the group before that page's.
 */
struct held {
	struct world *w;
	uint64_t page, id;
	pthread_t thread;
};

static void *held_read(void *arg)
{
	struct held *held = arg;

	CHECK_EQ(isw_sim_submit(held->w->e, ISW_SIM_READ, held->page * ISW_PAGE_BYTES,
				2 * ISW_PAGE_BYTES, NULL, &held->id),
		 0);
	return NULL;
}

static void *held_disk_error(void *arg)
{
	CHECK_EQ(isw_engine_step(((struct held *)arg)->w->e, ISW_STEP_BACKUP_FAIL, 0, 0), 1);
	return NULL;
}

static void hold(struct held *held, void *(*run)(void *))
{
	const struct timespec tick = {.tv_nsec = 100000};

	pthread_mutex_lock(&iswi_shard_of(held->w->e, held->page)->lock);
	CHECK_EQ(pthread_create(&held->thread, NULL, run, held), 0);
	while (!slab_of(held->w, 0).in_flight)
		nanosleep(&tick, NULL);
}

static void let_go(struct held *held)
{
	pthread_mutex_unlock(&iswi_shard_of(held->w->e, held->page)->lock);
	CHECK_EQ(pthread_join(held->thread, NULL), 0);
	reap(held->w);
}

/* Slab 0 has two groups, its pages' border lies before page 32. */
static struct world *world_of_groups(uint32_t flags)
{
	struct isw_engine_config config = world_config(flags);

	config.size_bytes = config.slab_bytes = 2 * ISWI_GROUP_PAGES * ISW_PAGE_BYTES;
	return world_of_three(&config);
}

/* It saw the slab at its old place only, and its page is at the new one. */
static void a_place_that_is_mapped_since_is_looked_at(void)
{
	struct world *w = world_of_groups(ISW_ENGINE_NO_BACKUP);
	struct held held = {.w = w, .page = 31};

	map(w, 0, SOURCE);
	write_settled(w, 31, 2, 31);
	hold(&held, held_read);
	migrate(w, 0, TARGET);
	put(w, 32, 1, 132);
	REPLY(w, TARGET, 0);
	CHECK(is_at(w, 31, SOURCE) && is_at(w, 32, TARGET));
	let_go(&held);
	settle(w);
	CHECK_EQ(w->error[held.id], 0);
	CHECK_EQ(w->got[held.id][0], 31);
	CHECK_EQ(w->got[held.id][1], 132);
	moving_end(w);
}

/* The same when the backup has failed it: the donor is the last that has it. */
static void a_place_that_is_mapped_since_is_looked_at_after_the_backup(void)
{
	struct world *w = world_of_groups(0);
	struct held held = {.w = w, .page = 31};
	uint32_t id, next;

	write_settled(w, 31, 2, 31);
	map(w, 0, SOURCE);
	id = get(w, 31, 2);
	DISK_TAKE_READ(w);
	put(w, 31, 1, 131); /* is read where it is staged; page 32 matters */
	REPLY(w, SOURCE, 0);
	hold(&held, held_disk_error);
	migrate(w, 0, TARGET);
	CHECK_EQ(isw_slab_fill(w->e, 0, slab_of(w, 0).generation, 32, 1, &next), 1);
	DISK_TAKE_READ(w);
	DISK_DONE(w, 0);
	REPLY(w, TARGET, 0);
	CHECK(is_at(w, 32, TARGET));
	let_go(&held);
	settle(w);
	CHECK_EQ(w->error[id], 0);
	CHECK_EQ(w->got[id][0], 131);
	CHECK_EQ(w->got[id][1], 32);
	moving_end(w);
}

/* ------------------------------------------------------------ writers and a migration */

#define MIGRATIONS 20000u
#define MIGRATE_NS 1000000000ull

struct writers {
	struct world *w;
	atomic_bool stop;
	atomic_bool left[2]; /* places of slab 0 that writes have left for good; seq_cst */
	atomic_uint wrong;
};

/* What a write does, but for writing. */
static void *write_nothing(void *arg)
{
	struct writers *writers = arg;
	struct isw_engine *e = writers->w->e;
	struct iswi_use use;

	while (!atomic_load(&writers->stop)) {
		if (!iswi_slab_get(e, 0, &use))
			continue;
		if (atomic_load(&writers->left[use.place]))
			atomic_fetch_add(&writers->wrong, 1);
		iswi_place_put(e, 0, use.place);
	}
	return NULL;
}

/*
 * R8, of real threads: whoever has made another place current and has then seen the old one unused
 * has seen the last of its writes.
 */
static void no_write_begins_at_a_place_that_was_left(void)
{
	struct world *w = world_moving(0, 0);
	struct writers writers = {.w = w};
	uint64_t end_ns = iswi_now_ns() + MIGRATE_NS;
	uint32_t migrations = 0;
	pthread_t threads[2];

	leave(w);
	for (int i = 0; i < 2; i++)
		CHECK_EQ(pthread_create(&threads[i], NULL, write_nothing, &writers), 0);
	while (migrations < MIGRATIONS && iswi_now_ns() < end_ns) {
		uint32_t old = atomic_load(&w->e->slabs[0].current);

		atomic_store(&writers.left[!old], false);
		migrate(w, 0, migrations++ % 2 ? TARGET : SOURCE);
		while (atomic_load(&iswi_place(w->e, 0, old)->in_flight))
			;
		atomic_store(&writers.left[old], true);
		sched_yield(); /* for one that had looked before */
		leave(w);
		while (slab_of(w, 0).source_state != ISW_SLAB_UNMAPPED)
			;
	}
	atomic_store(&writers.stop, true);
	for (int i = 0; i < 2; i++)
		CHECK_EQ(pthread_join(threads[i], NULL), 0);
	reap(w);
	CHECK_EQ(atomic_load(&writers.wrong), 0);
	CHECK_EQ(w->events[ISW_EVENT_SLAB_DRAINED], migrations + 1);
	moving_end(w);
}

/* -------------------------------------------------------------------- without a backup */

static void a_complete_pull_loses_nothing(void)
{
	struct world *w = world_pulling(ISW_ENGINE_NO_BACKUP, READING, 6);

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
	moving_end(w);
}

static void what_is_still_at_the_source_is_lost_with_it(void)
{
	struct world *w = world_moving(ISW_ENGINE_NO_BACKUP, 6);

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
	moving_end(w);
}

/* Its copy is under way when its place is given up: that is no loss. */
static void a_page_under_way_is_not_lost_with_the_source(enum stage stage)
{
	struct world *w = world_pulling(ISW_ENGINE_NO_BACKUP, stage, 2);
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
	moving_end(w);
}

/* Whatever becomes of its place: the bytes are still here, and there is another donor. */
static void a_write_that_the_source_has_not_got_goes_to_the_target(int way)
{
	struct world *w = world_writing(ISW_ENGINE_NO_BACKUP);
	uint32_t id = (uint32_t)w->e->sim->ids; /* the write */

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
	moving_end(w);
}

/* Once: a write that both have failed has failed. */
static void a_write_that_both_have_failed_has_failed(void)
{
	struct world *w = world_writing(ISW_ENGINE_NO_BACKUP);
	uint32_t id = (uint32_t)w->e->sim->ids;

	REFUSE(w, SOURCE, 0);
	CHECK_EQ(w->error[id], PENDING);
	REFUSE(w, TARGET, 0);
	CHECK_EQ(w->error[id], -EIO);
	CHECK_EQ(sent(w, SOURCE) + sent(w, TARGET), 0);
	CHECK_EQ(stats_of(w).staging_pages_used, 0);
	CHECK_EQ(read_settled(w, 0), -EIO);
	CHECK_EQ(read_settled(w, 1), 11);
	moving_end(w);
}

/* The copy under way was the last, and does not arrive: lost, which is said, and costs no buffer.
 */
static void a_page_that_does_not_arrive_is_lost(bool breaks)
{
	struct world *w = world_pulling(ISW_ENGINE_NO_BACKUP, WRITING, 2);

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
	moving_end(w);
}

static void pages_of_the_source_are_read_without_a_target(enum stage stage)
{
	struct world *w = world_pulling(ISW_ENGINE_NO_BACKUP, stage, 2);
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
	CHECK_EQ(pull_slab(w, 0, 1), 0);
	settle(w);
	source_is(w, 0, 0);
	leave(w);
	CHECK_EQ(read_settled(w, 0), 10);
	CHECK_EQ(read_settled(w, 1), 11);
	moving_end(w);
}

static void a_break_of_the_source_keeps_what_it_has(void)
{
	struct world *w = world_pulling(ISW_ENGINE_NO_BACKUP, READING, 2);

	BREAK(w, SOURCE);
	migrated(w, 0, 2);
	CHECK_EQ(read_settled(w, 0), -EIO); /* for now */
	reconnect(w, SOURCE);
	resume_source(w);
	CHECK_EQ(read_settled(w, 0), 10);
	CHECK_EQ(pull_slab(w, 0, 1), 0);
	settle(w);
	source_is(w, 0, 0);
	leave(w);
	CHECK_EQ(read_settled(w, 1), 11);
	moving_end(w);
}

/* A donor of our own: it keeps what it is given, and is silent. */
struct quiet {
	struct iswi_queue base;
	struct iswi_xfer *got;
	struct world *w;
	uint32_t source_state; /* of slab 0, when it was given that */
};

static void quiet_submit(struct iswi_queue *queue, struct iswi_xfer *first)
{
	struct quiet *quiet = (struct quiet *)queue;

	quiet->got = first;
	quiet->source_state = slab_of(quiet->w, 0).source_state;
}

static void quiet_ignore(struct iswi_queue *queue)
{
	(void)queue;
}

static const struct iswi_transport_ops quiet_ops = {"quiet", quiet_submit, quiet_ignore,
						    quiet_ignore};

/* Page 0 is being pulled from donor 0 to the quiet one. */
static struct world *world_quiet(struct quiet *quiet, uint32_t *remote)
{
	struct world *w = world_new(ISW_ENGINE_NO_BACKUP);
	struct iswi_queue *queues[] = {&quiet->base};

	*quiet = (struct quiet){.base.ops = &quiet_ops, .w = w};
	*remote = ISW_NO_REMOTE;
	CHECK_EQ(remote_new(w), SOURCE);
	CHECK_EQ(iswi_remote_reserve(w->e, remote), 0);
	iswi_remote_set(w->e, *remote, queues, 1, ISWI_REMOTE_UP);
	map(w, 0, SOURCE);
	write_settled(w, 0, 1, 10);
	migrate(w, 0, *remote);
	CHECK_EQ(pull(w), 0);
	return w;
}

/* A pulled page arrives together with the break of another connection of the target's. */
static void an_acknowledgement_counts_that_meets_the_break(void)
{
	struct quiet quiet;
	uint32_t remote;
	struct world *w = world_quiet(&quiet, &remote);

	REPLY(w, SOURCE, 0);
	CHECK(quiet.got);
	iswi_remote_fence(w->e, remote, -ECONNRESET);
	quiet.got->done(quiet.got, 0);
	reap(w);
	CHECK_EQ(slab_of(w, 0).state, ISW_SLAB_SUSPENDED);
	CHECK(is_at(w, 0, remote)); /* it is there, and will be after the resume */
	source_is(w, 0, 0);
	moving_end(w);
}

/* Or somebody would find it neither there nor here. */
static void a_page_is_staged_before_its_place_is_given_up(void)
{
	struct quiet quiet;
	uint32_t remote;
	struct world *w = world_quiet(&quiet, &remote);

	leave(w);
	REPLY(w, SOURCE, 0);
	CHECK_EQ(quiet.source_state, ISW_SLAB_DRAINING);
	CHECK_EQ(slab_of(w, 0).source_state, ISW_SLAB_UNMAPPED);
	quiet.got->done(quiet.got, 0);
	CHECK(is_at(w, 0, remote));
	moving_end(w);
}

int main(void)
{
	a_slab_has_a_source_until_it_is_unmapped();
	only_a_slab_that_is_somewhere_migrates();
	a_donor_that_is_down_is_no_target();
	two_donors_may_have_the_same_generation();
	each_place_has_its_own_slot();
	a_page_is_read_where_it_is();
	a_source_that_refuses_is_passed_by();
	a_source_that_lies_is_not_believed();
	a_page_that_moves_while_the_source_lies_is_believed();
	a_read_that_the_source_fails_finds_what_was_pulled(0);
	a_read_that_the_source_fails_finds_what_was_pulled(ISW_ENGINE_NO_BACKUP);
	writes_go_to_the_new_place_only();
	an_older_write_counts_where_it_went();
	newer_data_waits_and_goes_to_the_new_place();
	newer_data_waits_for_an_old_place_that_drains();
	newer_data_waits_for_an_old_place_that_breaks();
	for (int i = 0; i < 4; i++)
		newer_data_finds_the_new_place(i & 1, i & 2);
	a_place_is_the_same_whatever_it_is_to_the_slab();
	a_pull_brings_everything();
	only_a_slab_at_both_ends_is_pulled();
	a_pulled_page_is_at_the_source_until_the_acknowledgement();
	a_page_with_a_write_in_flight_is_passed_over();
	a_page_is_pulled_once();
	a_write_that_is_all_over_wins();
	a_write_of_the_same_bytes_wins();
	the_rest_of_a_run_is_pulled();
	a_source_that_refuses_keeps_its_pages();
	wrong_bytes_are_not_pulled();
	a_source_that_broke_is_given_up();
	a_source_is_drained_after_its_last_transfer();
	a_pull_does_not_go_on_at_a_source_that_drains();
	a_target_that_refuses_has_nothing();
	a_torn_page_is_not_pulled();
	a_target_that_is_lost();
	each_place_has_its_own_bits(true);
	each_place_has_its_own_bits(false);
	the_source_may_get_more_while_it_is_written();
	a_fill_does_not_go_to_the_source();
	fill_and_pull_go_side_by_side();
	the_slab_next_to_it_is_left_alone();
	slabs_are_pulled_in_turn();
	a_slab_that_migrates_again_is_pulled_from_its_start();
	every_page_of_any_slab_is_pulled(4);
	every_page_of_any_slab_is_pulled(20);
	every_page_of_any_slab_is_pulled(32);
	every_page_of_any_slab_is_pulled(48);
	every_page_of_any_slab_is_pulled(100);
	a_pull_sets_its_own_pace();
	a_pull_goes_on_past_what_it_drops();
	a_second_pass_finds_what_the_first_left();
	a_pull_without_buffers_goes_on_when_asked_again();
	writes_go_on_with_the_buffers_of_a_pull();
	a_read_of_the_source_is_hedged();
	a_source_that_hangs_is_passed_by();
	a_place_that_is_mapped_since_is_looked_at();
	a_place_that_is_mapped_since_is_looked_at_after_the_backup();
	no_write_begins_at_a_place_that_was_left();
	a_complete_pull_loses_nothing();
	what_is_still_at_the_source_is_lost_with_it();
	a_page_that_does_not_arrive_is_lost(false);
	a_page_that_does_not_arrive_is_lost(true);
	a_break_of_the_source_keeps_what_it_has();
	for (int way = 0; way < 3; way++)
		a_write_that_the_source_has_not_got_goes_to_the_target(way);
	a_write_that_both_have_failed_has_failed();
	an_acknowledgement_counts_that_meets_the_break();
	a_page_is_staged_before_its_place_is_given_up();
	for (enum stage stage = 0; stage < STAGES; stage++) {
		a_write_wins(stage);
		zeros_win(stage, ISW_SIM_TRIM);
		zeros_win(stage, ISW_SIM_ZERO);
		a_write_after_zeros_wins(stage);
		a_source_that_breaks(stage);
		a_pull_ends_with_its_errors(stage);
		a_pull_does_not_follow_its_slab(stage);
		a_pull_is_nothing_to_wait_for(stage);
		an_engine_may_end_in_the_middle_of_it(stage);
		a_page_under_way_is_not_lost_with_the_source(stage);
		pages_of_the_source_are_read_without_a_target(stage);
	}
	return 0;
}
