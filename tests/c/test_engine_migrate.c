/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Slabs that migrate: each page is where it was valid last, writes go to the new place, and both
 * places are given up by themselves. One order of events per test.
 */
#include <pthread.h>
#include <sched.h>
#include <time.h>

#include "migrate_fixture.h"

/* ---------------------------------------------------------- mapped to one more donor */

WORLD_TEST(a_slab_has_a_source_until_it_is_unmapped, world_moving(0, 2))
{
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
}

WORLD_TEST(only_a_slab_that_is_somewhere_migrates, world_moving(0, 1))
{
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
}

WORLD_TEST(a_donor_that_is_down_is_no_target, world_of_two())
{
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
	pull_all(w);
	CHECK(is_at(w, 0, TARGET));
}

/* Each donor counts its own. */
WORLD_TEST(two_donors_may_have_the_same_generation, world_of_two())
{
	uint32_t pages;

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
}

WORLD_TEST(each_place_has_its_own_slot, world_of_two())
{
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
	pull_all(w);
	source_is(w, 0, 0);
	CHECK_EQ(donor_value(w, TARGET, 2 * SLAB_PAGES), 20);
	CHECK_EQ(donor_value(w, TARGET, 2 * SLAB_PAGES + 2), 12);
	CHECK_EQ(stats_of(w).crc_errors_remote, 0);
	CHECK_EQ(stats_of(w).pages_in_remote, 3);
}

/* ------------------------------------------------------------------------- reads */

WORLD_TEST(a_page_is_read_where_it_is, world_moving(0, 8))
{
	uint32_t id;

	write_settled(w, 2, 2, 102);
	write_settled(w, 7, 1, 107);
	id = get(w, 0, 8);
	CHECK_EQ(sent(w, SOURCE), 2); /* 0 and 1, 4 to 6 */
	CHECK_EQ(sent(w, TARGET), 2); /* 2 and 3, 7 */
	CHECK_EQ(iswi_sim_of(w->e)->donors[SOURCE]->pending[0].xfer->length, 2 * ISW_PAGE_BYTES);
	CHECK_EQ(iswi_sim_of(w->e)->donors[SOURCE]->pending[1].xfer->length, 3 * ISW_PAGE_BYTES);
	CHECK_EQ(iswi_sim_of(w->e)->donors[TARGET]->pending[0].xfer->length, 2 * ISW_PAGE_BYTES);
	CHECK_EQ(slab_of(w, 0).in_flight, 2);
	CHECK_EQ(slab_of(w, 0).source_in_flight, 2);
	settle(w);
	for (uint64_t page = 0; page < 8; page++)
		CHECK_EQ(w->got[id][page],
			 page == 2 || page == 3 || page == 7 ? 100 + page : 10 + page);
	CHECK_EQ(stats_of(w).pages_in_remote, 8);
	CHECK_EQ(stats_of(w).crc_errors_remote, 0);
}

WORLD_CASES(a_source_that_refuses_or_lies_is_passed_by, 2, lies, world_moving(0, 2))
{
	uint32_t id = get(w, 0, 1), event = lies ? ISW_EVENT_BAD_PAGE : ISW_EVENT_SLAB_ERROR;

	for (uint32_t i = 0; lies && i < 2; i++)
		CORRUPT(w, SOURCE, 0);
	if (!lies)
		REFUSE(w, SOURCE, 0);
	CHECK_EQ(w->events[event], 1);
	CHECK_EQ(w->last[event].remote, SOURCE);
	if (lies)
		CHECK(!is_remote_valid(w, 0) && is_at(w, 1, SOURCE));
	else
		CHECK_EQ(w->last[event].generation, 1);
	READ_ENDS(w, id, 10);
	CHECK_EQ(stats_of(w).pages_in_backup, 1);
}

/* What the old donor said of it says nothing of what the new one has. */
WORLD_TEST(a_page_that_moves_while_the_source_lies_is_believed, world_moving(0, 1))
{
	uint32_t id = get(w, 0, 1);

	CORRUPT(w, SOURCE, 0); /* it is read once more */
	CHECK_EQ(pull(w), 0);
	REPLY(w, SOURCE, 1);
	REPLY(w, TARGET, 0);
	CHECK(is_at(w, 0, TARGET));
	CORRUPT(w, SOURCE, 0);
	CHECK(is_at(w, 0, TARGET));
	CHECK_EQ(w->events[ISW_EVENT_BAD_PAGE], 0);
	READ_ENDS(w, id, 10);
}

/* The source failed a read; by then its page is at the target. */
WORLD_CASES(a_read_that_the_source_fails_finds_what_was_pulled, 2, lossy,
	    world_moving(lossy ? ISW_ENGINE_NO_BACKUP : 0, 1))
{
	uint32_t id = get(w, 0, 1);

	CHECK_EQ(pull(w), 0);
	REPLY(w, SOURCE, 1);
	REPLY(w, TARGET, 0);
	CHECK(is_at(w, 0, TARGET));
	REFUSE(w, SOURCE, 0);
	CHECK_EQ(sent_for(w, TARGET, 0, ISWI_XFER_READ), 1);
	REPLY(w, TARGET, 0);
	GOT(w, id, 10);
}

/* ------------------------------------------------------------------------ writes */

WORLD_TEST(writes_go_to_the_new_place_only, world_moving(0, 4))
{
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
}

WORLD_TEST(an_older_write_counts_where_it_went, world_of_two())
{
	uint32_t id;

	map(w, 0, SOURCE);
	id = put(w, 0, 2, 10);
	migrate(w, 0, TARGET);
	source_is(w, 0, 1);
	REPLY(w, SOURCE, 0);
	CHECK_EQ(w->error[id], 0);
	CHECK(is_at(w, 0, SOURCE) && is_at(w, 1, SOURCE));
	source_is(w, 2, 0);
	CHECK_EQ(read_settled(w, 1), 11);
	pull_all(w);
	CHECK(is_at(w, 0, TARGET) && is_at(w, 1, TARGET));
	source_is(w, 0, 0);
}

WORLD_CASES(newer_data_waits_and_goes_to_the_new_place, 2, old_one_drains, world_writing(0))
{
	uint32_t id = put(w, 0, 1, 30);

	if (old_one_drains)
		leave(w);
	not_drained(w);
	CHECK_EQ(sent_for(w, SOURCE, 0, ISWI_XFER_WRITE), 1);
	CHECK_EQ(sent(w, TARGET), 0); /* R3 */
	REPLY(w, SOURCE, 0);
	if (old_one_drains)
		drained(w, SOURCE, 1);
	CHECK(!is_remote_valid(w, 0));
	CHECK_EQ(sent(w, SOURCE), 0);
	CHECK_EQ(sent_for(w, TARGET, 0, ISWI_XFER_WRITE), 1);
	CHECK_EQ(slab_of(w, 0).source_in_flight, 0);
	CHECK_EQ(slab_of(w, 0).in_flight, 1);
	CHECK_EQ(w->error[id], PENDING);
	REPLY(w, TARGET, 0);
	CHECK_EQ(w->error[id], 0);
	CHECK(is_at(w, 0, TARGET));
	CHECK_EQ(is_at(w, 1, SOURCE), !old_one_drains);
	CHECK_EQ(is_remote_valid(w, 1), !old_one_drains);
	CHECK_EQ(donor_value(w, TARGET, 0), 30);
	CHECK_EQ(read_settled(w, 0), 30);
}

WORLD_TEST(newer_data_waits_for_an_old_place_that_breaks, world_writing(0))
{
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
}

/* The new place is gone, or going, when the older write ends: newer data has nowhere to go. */
WORLD_CASES(newer_data_finds_the_new_place, 4, n, world_writing(0))
{
	bool draining = n & 1, source_too = n & 2;
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
}

/* The place that was current when it was sent has become the source. */
WORLD_TEST(a_place_is_the_same_whatever_it_is_to_the_slab, world_moving(0, 0))
{
	uint32_t id = put(w, 0, 1, 10);

	leave(w); /* nothing is there */
	migrate(w, 0, THIRD);
	REPLY(w, TARGET, 0);
	CHECK_EQ(w->error[id], 0);
	CHECK(is_at(w, 0, TARGET));
	source_is(w, 1, 0);
	settle(w);
	pull_all(w);
	CHECK(is_at(w, 0, THIRD));
	CHECK_EQ(donor_value(w, THIRD, 0), 10);
}

/* ------------------------------------------------------------------ what is left there */

WORLD_TEST(the_source_may_get_more_while_it_is_written, world_writing(0))
{
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
	READ_ENDS(w, read, 30);
	CHECK_EQ(isw_slab_pages_at(w->e, 0, SOURCE, info.source_generation, &pages), -ESTALE);
}

/* Copies from the disk are under way when the slab migrates: they may not go where it was (R8). */
WORLD_TEST(a_fill_does_not_go_to_the_source, world_of_two())
{
	write_settled(w, 0, 2, 10);
	map(w, 0, SOURCE);
	fill(w, 0, 9, 2);
	DISK_TAKE_READ(w);
	migrate(w, 0, TARGET);
	source_is(w, 0, 0); /* and that is final */
	DISK_DONE(w, 0);
	CHECK_EQ(sent(w, SOURCE) + sent(w, TARGET), 0);
	source_is(w, 0, 0);
	CHECK_EQ(stats_of(w).pages_copy_dropped, 2);
	fill(w, 0, 9, 2);
	settle(w);
	CHECK(is_at(w, 0, TARGET) && is_at(w, 1, TARGET));
}

WORLD_TEST(fill_and_pull_go_side_by_side, world_of_two())
{
	write_settled(w, 0, 6, 10);
	map(w, 0, SOURCE);
	write_settled(w, 2, 2, 22);
	migrate(w, 0, TARGET);
	fill(w, 0, 9, 4);
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
}

/* ------------------------------------------------------------------------ hedges */

static struct world *world_hedging(void)
{
	struct world *w =
		with_three(WORLD_BUT(config.staging_pages = 64; config.hedge_us_min = 5000));

	map(w, 0, SOURCE);
	write_settled(w, 0, SLAB_PAGES, 10);
	migrate(w, 0, TARGET);
	return w;
}

static unsigned int owed(const struct world *w, uint32_t remote)
{
	return atomic_load(&w->e->remotes[remote].owed);
}

WORLD_TEST(a_read_of_the_source_is_hedged, world_hedging())
{
	uint32_t id = get(w, 0, 2);

	SLOW(w, SOURCE, 0);
	CHECK_EQ(owed(w, SOURCE), 1);
	CHECK_EQ(owed(w, TARGET), 0);
	leave(w);
	DISK_READ(w);
	CHECK_EQ(w->error[id], 0);
	CHECK_EQ(w->got[id][1], 11);
	not_drained(w); /* the donor may still write into our buffers */
	CHECK_EQ(slab_of(w, 0).source_in_flight, 1);
	REPLY(w, SOURCE, 0);
	drained(w, SOURCE, 1);
	CHECK_EQ(owed(w, SOURCE), 0);
	CHECK_EQ(owed(w, TARGET), 0);
}

WORLD_TEST(a_source_that_hangs_is_passed_by, world_hedging())
{
	uint32_t id;

	write_settled(w, 0, 1, 20);
	for (uint32_t i = 0; i < ISWI_OWED_MAX; i++) {
		get(w, 1, 1);
		SLOW(w, SOURCE, i);
	}
	disk_settle(w);
	CHECK_EQ(owed(w, SOURCE), ISWI_OWED_MAX);
	id = get(w, 0, 3);
	CHECK_EQ(sent(w, SOURCE), ISWI_OWED_MAX);
	CHECK_EQ(sent_for(w, TARGET, 0, ISWI_XFER_READ), 1); /* which does not hang */
	REPLY(w, TARGET, 0);
	disk_settle(w);
	GOT(w, id, 20);
	CHECK_EQ(w->got[id][2], 12);
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
	return with_three(WORLD_BUT(config.flags = flags;
				    config.slab_bytes = 2 * ISWI_GROUP_PAGES * ISW_PAGE_BYTES;
				    config.size_bytes = config.slab_bytes));
}

/* It saw the slab at its old place only, and its page is at the new one. */
WORLD_TEST(a_place_that_is_mapped_since_is_looked_at, world_of_groups(ISW_ENGINE_NO_BACKUP))
{
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
}

/* The same when the backup has failed it: the donor is the last that has it. */
WORLD_TEST(a_place_that_is_mapped_since_is_looked_at_after_the_backup, world_of_groups(0))
{
	struct held held = {.w = w, .page = 31};
	uint32_t id;

	write_settled(w, 31, 2, 31);
	map(w, 0, SOURCE);
	id = get(w, 31, 2);
	DISK_TAKE_READ(w);
	put(w, 31, 1, 131); /* is read where it is staged; page 32 matters */
	REPLY(w, SOURCE, 0);
	hold(&held, held_disk_error);
	migrate(w, 0, TARGET);
	fill(w, 32, 1, 1);
	DISK_READ(w);
	REPLY(w, TARGET, 0);
	CHECK(is_at(w, 32, TARGET));
	let_go(&held);
	READ_ENDS(w, id, 131);
	CHECK_EQ(w->got[id][1], 32);
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
WORLD_TEST(no_write_begins_at_a_place_that_was_left, world_moving(0, 0))
{
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
}
