/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Reading ahead: reads with a trend get what comes next before they ask, the newest bytes or none
 * (R14), and each request that waits for it is answered once (R15).
 */
#include "engine_fixture.h"

#define VALUE 100u                 /* of page 0; page i of the device holds VALUE + i */
#define READ  (int)(PAGES - TREND) /* of the world below, ahead */
#define TREND 5u /* reads of a stream that make a trend: the last begins to read ahead */

/* Every page is on donor 0, and on the backup if there is one. Nothing was read yet. */
static struct world *world_ahead(uint32_t flags)
{
	struct world *w =
		WORLD_BUT(config.flags = ISW_ENGINE_READ_AHEAD | flags; config.hedge_us_min = 5000);

	CHECK_EQ(remote_new(w), 0);
	for (uint32_t slab = 0; slab < SLABS; slab++) {
		map(w, slab, 0);
		write_settled(w, slab * SLAB_PAGES, SLAB_PAGES, VALUE + slab * SLAB_PAGES);
	}
	return w;
}

/* The donor's answer to a request, past what is read ahead. */
static void reply_to_request(struct world *w)
{
	const struct iswi_sim_donor *donor = iswi_sim_of(w->e)->donors[0];
	uint32_t n = 0;

	while (!ISWI_CONTAINER(donor->pending[n].xfer, struct iswi_op, xfer)->req)
		CHECK(++n < donor->pending_count);
	REPLY(w, 0, n);
}

/* Reads pages one by one, up to or down to `last`; what is then read ahead stays under way. */
static void read_in_order(struct world *w, uint64_t first, uint64_t last)
{
	for (uint64_t page = first;; page += first <= last ? 1 : -1) {
		uint32_t id = get(w, page, 1);

		if (w->error[id] == PENDING)
			reply_to_request(w);
		GOT(w, id, VALUE + page);
		if (page == last)
			break;
	}
}

static struct world *world_of_a_trend(uint32_t flags)
{
	struct world *w = world_ahead(flags);

	read_in_order(w, 0, TREND - 1);
	CHECK_EQ(sent(w, 0), SLABS); /* the rest of the first slab, and each of the others */
	CHECK_EQ(stats_of(w).pages_ahead, PAGES - TREND);
	return w;
}

/* ... and all of it is at rest. */
static struct world *world_at_rest(uint32_t flags)
{
	struct world *w = world_of_a_trend(flags);

	settle(w);
	return w;
}

static void ahead_is(const struct world *w, uint64_t used, uint64_t wasted)
{
	CHECK_EQ(stats_of(w).pages_ahead_used, used);
	CHECK_EQ(stats_of(w).pages_ahead_wasted, wasted);
}

/* -------------------------------------------------------------------------- trends */

/* Requests of a table of streams, and the trend of the last one's stream after each. */
struct trends {
	struct iswi_stream streams[ISWI_AHEAD_STREAMS];
	uint32_t now;
};

static int trend(struct trends *t, uint64_t page, uint64_t pages)
{
	return iswi_trend_note(t->streams, ISWI_AHEAD_STREAMS, ++t->now, page, page + pages)->trend;
}

TEST(as_many_streams_as_there_are_do_not_mix)
{
	struct trends t = {0};

	for (uint32_t i = 0; i < 2 * TREND; i++)
		for (uint32_t s = 0; s < ISWI_AHEAD_STREAMS; s++) {
			int way = s % 2 ? -1 : 1;
			int got = trend(&t, (s + 1) * 1000 + (uint64_t)((int)i * way), 1);

			CHECK_EQ(got, i + 1 < TREND ? 0 : way);
		}
}

TEST(reads_at_random_do_not_end_a_stream)
{
	struct trends t = {0};
	uint64_t random = 1;

	for (uint32_t i = 0; i < 200; i++) {
		CHECK_EQ(trend(&t, 5000 + 8 * i, 8), i + 1 < TREND ? 0 : 1);
		for (uint32_t k = 0; k < ISWI_AHEAD_STREAMS - 1; k++) {
			random = random * 6364136223846793005ull + 1442695040888963407ull;
			CHECK_EQ(trend(&t, 1000000 + (random >> 33), 1), 0);
		}
	}
}

TEST(neither_size_nor_a_gap_nor_a_few_others_hide_a_trend)
{
	static const struct {
		uint32_t pages, gap;
	} moves[] = {{1, 0}, {8, 3}, {2, 31}, {8, 0}, {5, 1}, {32, 0}, {1, 7}, {3, 0}};
	struct trends t = {0};
	uint64_t page = 5000;

	for (uint32_t i = 0; i < 64; i++) {
		CHECK_EQ(trend(&t, page, moves[i % 8].pages), i + 1 < TREND ? 0 : 1);
		if (i % 4 == 3) /* once more: no vote */
			CHECK_EQ(trend(&t, page, moves[i % 8].pages), i + 1 < TREND - 1 ? 0 : 1);
		page += moves[i % 8].pages + moves[i % 8].gap;
	}
}

TEST_CASES(no_majority_no_trend, 2, large_strides)
{
	struct trends t = {0};

	for (uint32_t i = 0; i < 64; i++)
		CHECK_EQ(large_strides ? trend(&t, 5000 + 40 * i, 1)
				       : trend(&t, 5000 + (i % 2) * 20, 1),
			 0);
}

/* -------------------------------------------------------------------------- when */

WORLD_CASES(a_trend_in_either_direction, 2, back, world_ahead(0))
{
	uint32_t id;

	read_in_order(w, back ? PAGES - 1 : 0, back ? PAGES - TREND : TREND - 1);
	CHECK_EQ(stats_of(w).pages_ahead, PAGES - TREND);
	settle(w);
	id = get(w, back ? 0 : PAGES - 8, 8);
	CHECK_EQ(sent(w, 0), 0);
	GOT(w, id, VALUE + (back ? 0 : PAGES - 8));
	ahead_is(w, 8, 0);
	sources_are(w, TREND + 8, 0, 0);
}

WORLD_TEST(no_trend_no_reads, world_ahead(0))
{
	static const uint64_t pages[] = {16, 3, 27, 9, 21, 0, 30, 12, 25, 19, 22, 4};

	for (uint32_t i = 0; i < ISWI_ARRAY_LEN(pages); i++)
		CHECK_EQ(read_settled(w, pages[i]), VALUE + pages[i]);
	CHECK_EQ(stats_of(w).pages_ahead, 0);
}

WORLD_TEST(nothing_unless_asked_for, world_holding(0, 0, 8, VALUE))
{
	read_in_order(w, 0, 6);
	CHECK_EQ(sent(w, 0), 0);
	CHECK(!w->e->ahead);
}

/* Pages that are staged, zeros, or on the backup alone are not the donor's to give. */
WORLD_TEST(only_what_the_donor_has, world_ahead(0))
{
	uint32_t id;

	trim(w, 6, 1);
	put(w, 7, 1, 7000);
	unmap(w); /* slab 0: its pages are on the backup, and page 7 is staged */
	settle(w);
	for (uint64_t page = 8; page < 8 + TREND; page++)
		CHECK_EQ(read_settled(w, page), VALUE + page);
	trim(w, 17, 1);
	put(w, 18, 1, 1800);
	CHECK_EQ(stats_of(w).pages_ahead, PAGES - 8 - TREND);
	id = get(w, 16, 4);
	GOT(w, id, VALUE + 16);
	CHECK_EQ(w->got[id][1], 0);
	CHECK_EQ(w->got[id][2], 1800);
	CHECK_EQ(w->got[id][3], VALUE + 19);
	ahead_is(w, 2, 2);
}

/* Else a change would outdate one of the two. */
WORLD_CASES(a_page_is_read_ahead_once, 2, at_rest, world_of_a_trend(0))
{
	uint64_t before = stats_of(w).pages_ahead;

	REPLY(w, 0, 0); /* its group is free for others */
	if (at_rest)
		settle(w);
	w->e->ahead->streams[0].ahead = 9; /* as if another stream had come this way */
	read_in_order(w, 5, 5);
	CHECK_EQ(stats_of(w).pages_ahead, before);
	write_settled(w, 10, 1, 1000);
	CHECK(!iswi_ahead_has(w->e, 10));
}

/* Wrong guesses cost credit; right ones bring more than they cost. */
WORLD_CASES(credit, 2, used, world_of_a_trend(0))
{
	CHECK_EQ(atomic_load(&w->e->ahead->credit),
		 ISWI_AHEAD_CREDIT_FIRST - READ * ISWI_AHEAD_PAGE_TAKES);
	settle(w);
	if (used) {
		read_in_order(w, TREND, PAGES - 1);
		CHECK_EQ(atomic_load(&w->e->ahead->credit),
			 ISWI_AHEAD_CREDIT_FIRST +
				 READ * (ISWI_AHEAD_PAGE_GIVES - ISWI_AHEAD_PAGE_TAKES));
		return;
	}
	for (uint64_t page = 0; page < PAGES; page += 8) /* all of it outdated */
		write_settled(w, page, 8, VALUE + page);
	atomic_store(&w->e->ahead->credit, -2 * ISWI_AHEAD_PAGE_TAKES);
	w->e->ahead->streams[0].ahead = 0;
	read_in_order(w, 5, 7);
	CHECK_EQ(stats_of(w).pages_ahead, PAGES - TREND);
	read_in_order(w, 8, 8); /* a try */
	CHECK(stats_of(w).pages_ahead > PAGES - TREND);
}

/* ---------------------------------------------------------------------- right bytes */

enum change { WRITE, TRIM, ZERO, UNMAP, CHANGES };

static void change_page(struct world *w, enum change change)
{
	uint32_t id = 0;

	switch (change) {
	case WRITE:
		id = put(w, 6, 1, 600);
		break;
	case TRIM:
		id = trim(w, 6, 1);
		break;
	case ZERO:
		id = submit(w, ISW_SIM_ZERO, 6, 1, 0);
		break;
	default:
		unmap(w);
		return;
	}
	if (change == WRITE) /* the newest of what donor 0 has to do: it is safe there */
		REPLY(w, 0, sent(w, 0) - 1);
	CHECK_EQ(w->error[id], 0);
}

static uint64_t changed_value(enum change change)
{
	return change == WRITE ? 600 : change == UNMAP ? VALUE + 6 : 0;
}

/* At rest: whoever reads after the change gets what it made. */
WORLD_CASES(a_change_outdates_what_is_at_rest, CHANGES, change, world_at_rest(0))
{
	change_page(w, change);
	CHECK(!iswi_ahead_has(w->e, 6));
	CHECK_EQ(iswi_ahead_has(w->e, 7), change != UNMAP);
	CHECK_EQ(read_settled(w, 6), changed_value(change));
	ahead_is(w, 0, change == UNMAP ? 3 : 1);
	CHECK_EQ(stats_of(w).crc_errors_remote, 0);
}

/* On its way, with or without the old bytes having left the donor, or a request waiting. */
WORLD_CASES(a_change_outdates_what_is_on_its_way, 4 * (CHANGES - 1), n, world_of_a_trend(0))
{
	enum change change = n / 4;
	uint32_t joined = 0, id;

	if (n & 1)
		APPLY(w, 0, 0);
	if (n & 2)
		joined = get(w, 6, 2);
	change_page(w, change);
	CHECK_EQ(sent_for(w, 0, 6, ISWI_XFER_READ), 1); /* it joined */
	REPLY(w, 0, 0);
	if (joined)
		READ_ENDS(w, joined, changed_value(change));
	if (joined)
		CHECK_EQ(w->got[joined][1], VALUE + 7);
	id = get(w, 6, 1);
	READ_ENDS(w, id, changed_value(change));
	CHECK_EQ(stats_of(w).crc_errors_remote, 0);
	CHECK_EQ(stats_of(w).requests_failed, 0);
}

/* Written and acknowledged: the donor has the page, but what was read ahead is not it. */
WORLD_CASES(a_write_that_ended_outdates_as_well, 2, on_its_way, world_of_a_trend(0))
{
	APPLY(w, 0, 0);
	if (!on_its_way)
		REPLY(w, 0, 0);
	put(w, 6, 1, 600);
	REPLY(w, 0, sent(w, 0) - 1);
	DISK_WRITE(w);
	CHECK(is_remote_valid(w, 6));
	if (on_its_way)
		REPLY(w, 0, 0);
	CHECK(!iswi_ahead_has(w->e, 6));
	CHECK_EQ(read_settled(w, 6), 600);
	CHECK_EQ(stats_of(w).crc_errors_remote, 0);
}

WORLD_TEST(garbage_does_not_come_to_rest, world_of_a_trend(0))
{
	uint32_t id = get(w, 5, 3);

	CORRUPT(w, 0, 0); /* a byte of page 6 */
	CHECK_EQ(w->error[id], PENDING);
	CHECK_EQ(stats_of(w).crc_errors_remote, 1);
	READ_ENDS(w, id, VALUE + 5);
	CHECK_EQ(w->got[id][1], VALUE + 6);
	CHECK_EQ(w->got[id][2], VALUE + 7);
	ahead_is(w, 2, 1);
}

WORLD_TEST(what_failed_does_not_come_to_rest, world_of_a_trend(0))
{
	uint32_t id = get(w, 5, 1);

	REFUSE(w, 0, 0);
	CHECK(!iswi_ahead_has(w->e, 6));
	CHECK_EQ(sent(w, 0), SLABS - 1); /* the request goes to the backup, as any other would */
	DISK_READ(w);
	GOT(w, id, VALUE + 5);
	CHECK_EQ(w->events[ISW_EVENT_SLAB_ERROR], 1);
	ahead_is(w, 0, 3);
}

/* It is never the only copy: what is lost is lost, and reading it an error. */
WORLD_TEST(a_lost_page_is_not_had_from_here, world_at_rest(ISW_ENGINE_NO_BACKUP))
{
	unmap(w);
	CHECK_EQ(read_settled(w, 6), -EIO);
	CHECK_EQ(read_settled(w, 9), VALUE + 9);
}

/* While the donor is unreachable it is still the page, and there may be no other copy at hand. */
WORLD_TEST(a_suspended_slab_changes_no_page, world_at_rest(ISW_ENGINE_NO_BACKUP))
{
	BREAK(w, 0);
	CHECK_EQ(slab_of(w, 0).state, ISW_SLAB_SUSPENDED);
	CHECK_EQ(read_settled(w, 6), VALUE + 6);
	CHECK_EQ(read_settled(w, 6), -EIO); /* it is had once */
	donor_returns(w, 0);
	CHECK_EQ(read_settled(w, 6), VALUE + 6);
}

WORLD_TEST(migration_reads_where_the_page_is, world_at_rest(0))
{
	uint32_t id;

	CHECK_EQ(remote_new(w), 1);
	CHECK_EQ(isw_slab_migrate(w->e, 1, 1, 1, ++w->generations), 0);
	write_settled(w, 10, 2, 1000); /* these two go to the new place */
	read_in_order(w, 5, 9);
	settle(w);
	id = get(w, 8, 8);
	settle(w);
	GOT(w, id, VALUE + 8);
	for (uint32_t i = 1; i < 8; i++)
		CHECK_EQ(w->got[id][i], i == 2 || i == 3 ? 998 + i : VALUE + 8 + i);
	CHECK_EQ(stats_of(w).crc_errors_remote, 0);
}

/* ---------------------------------------------------------------------- who waits */

WORLD_TEST(a_request_joins_what_is_on_its_way, world_of_a_trend(0))
{
	uint32_t first = get(w, 5, 2), both = get(w, 6, 4);

	CHECK_EQ(sent(w, 0), SLABS);
	REPLY(w, 0, 0);
	GOT(w, first, VALUE + 5);
	CHECK_EQ(w->error[both], PENDING); /* half of it is of the next slab */
	REPLY(w, 0, 0);
	GOT(w, both, VALUE + 6);
	for (uint32_t i = 0; i < 4; i++)
		CHECK_EQ(w->got[both][i], VALUE + 6 + i);
	CHECK_EQ(sent(w, 0), SLABS - 2);
}

WORLD_TEST(one_too_many_reads_by_itself, world_of_a_trend(0))
{
	uint32_t ids[ISWI_AHEAD_WAITS + 1];

	for (uint32_t i = 0; i <= ISWI_AHEAD_WAITS; i++)
		ids[i] = get(w, 6, 1);
	CHECK_EQ(sent(w, 0), SLABS + 1);
	settle(w);
	for (uint32_t i = 0; i <= ISWI_AHEAD_WAITS; i++)
		GOT(w, ids[i], VALUE + 6);
}

/* Who joined goes to the backup at once; the transfer's late end does not concern them. */
WORLD_CASES(a_slow_donor_holds_up_nobody, 2, writes, world_of_a_trend(0))
{
	uint32_t id = get(w, 5, 2);

	SLOW(w, 0, 0);
	CHECK_EQ(sent(w, 0), SLABS);
	DISK_READ(w);
	GOT(w, id, VALUE + 5);
	CHECK_EQ(stats_of(w).fallback_slow, 2);
	if (writes)
		put(w, 5, 1, 500);
	REPLY(w, 0, 0);
	CHECK_EQ(read_settled(w, 5), writes ? 500 : VALUE + 5);
}

/* What is slow is so for all of its pages: who comes later does not find that out once more. */
WORLD_TEST(a_page_that_is_slow_to_come_is_read_from_the_backup, world_of_a_trend(0))
{
	uint32_t id;

	SLOW(w, 0, 0);
	for (uint64_t page = 5; page < SLAB_PAGES; page++) {
		id = get(w, page, 1);
		CHECK_EQ(sent(w, 0), SLABS);
		DISK_READ(w);
		GOT(w, id, VALUE + page);
	}
	CHECK_EQ(stats_of(w).hedged_reads, 0);
	id = get(w, 5, 1); /* the disk fails: the donor is asked after all */
	DISK_TAKE_READ(w);
	DISK_FAIL(w, 0);
	CHECK_EQ(sent(w, 0), SLABS + 1);
	READ_ENDS(w, id, VALUE + 5);
}

/* As slow reads that somebody waits for do. */
WORLD_TEST(reads_ahead_that_are_slow_make_a_donor_one_to_avoid, world_of_a_trend(0))
{
	for (uint32_t i = 0; i < SLABS; i++)
		SLOW(w, 0, i);
	for (uint32_t i = SLABS; i < ISWI_OWED_MAX; i++) {
		get(w, 0, 1);
		SLOW(w, 0, i);
		DISK_READ(w);
	}
	get(w, 1, 1);
	CHECK_EQ(sent(w, 0), ISWI_OWED_MAX);
	DISK_READ(w);
	REPLY(w, 0, 0);
	get(w, 1, 1);
	CHECK_EQ(sent(w, 0), ISWI_OWED_MAX);
	settle(w);
	CHECK_EQ(w->e->remotes[0].owed, 0);
}

WORLD_TEST(the_donor_goes_down_under_it, world_of_a_trend(0))
{
	uint32_t id = get(w, 6, 4);

	BREAK(w, 0);
	READ_ENDS(w, id, VALUE + 6);
	CHECK_EQ(stats_of(w).pages_in_backup, 4);
	CHECK_EQ(stats_of(w).requests_failed, 0);
	ahead_is(w, 0, PAGES - TREND);
}

/* ---------------------------------------------------------------- others meanwhile */

/* It holds a use of the place as long as it is on its way, and no longer. */
WORLD_CASES(unmap_waits_for_it_only_on_its_way, 2, at_rest, world_of_a_trend(0))
{
	if (at_rest)
		REPLY(w, 0, 0);
	CHECK_EQ(slab_of(w, 0).in_flight, !at_rest);
	unmap(w);
	CHECK_EQ(w->events[ISW_EVENT_SLAB_DRAINED], at_rest);
	if (!at_rest)
		REPLY(w, 0, 0);
	CHECK_EQ(w->events[ISW_EVENT_SLAB_DRAINED], 1);
	CHECK_EQ(read_settled(w, 6), VALUE + 6);
}

/* A copy begins on a page without an entry (R6): one that is read ahead is such a page. */
WORLD_CASES(copies_are_not_held_up, 2, at_rest, world_of_a_trend(0))
{
	if (at_rest)
		settle(w);
	CHECK_EQ(remote_new(w), 1);
	CHECK_EQ(isw_slab_migrate(w->e, 0, 1, 0, ++w->generations), 0);
	CHECK(isw_slab_pull(w->e, 0, w->generations, 0) >= 0);
	settle(w);
	CHECK_EQ(stats_of(w).pages_migrated, SLAB_PAGES);
	CHECK_EQ(read_settled(w, 6), VALUE + 6);
}

/* Its buffers are its own: writes have all of staging. */
WORLD_TEST(no_write_waits_for_it, world_of_a_trend(0))
{
	CHECK_EQ(stats_of(w).staging_pages_used, 0);
	for (uint64_t page = 0; page < STAGING; page += 8)
		put(w, page, 8, 1000 + page);
	CHECK_EQ(stats_of(w).staging_waits, 0);
}

/* The slab's activity is what was asked for. */
WORLD_TEST(activity_is_that_of_the_requests, world_at_rest(0))
{
	struct isw_slab_info info = slab_of(w, 1);

	CHECK_EQ(info.page_ins, 0);
	get(w, 8, 4);
	info = slab_of(w, 1);
	CHECK_EQ(info.page_ins, 4);
}

static uint64_t reads_waited(const struct world *w)
{
	struct isw_engine_stats stats = stats_of(w);
	uint64_t sum = 0;

	for (uint32_t i = 0; i < ISW_LATENCY_BUCKETS; i++)
		sum += stats.waited_read_latency[i];
	CHECK_EQ(stats.read_requests_waited, sum);
	return sum;
}

/* A read that joins what is under way waits; one that finds it here does not. */
WORLD_CASES(reads_that_wait_are_counted_apart, 2, at_rest, world_of_a_trend(0))
{
	CHECK_EQ(reads_waited(w), TREND);
	if (at_rest)
		settle(w);
	read_settled(w, TREND);
	CHECK_EQ(reads_waited(w), at_rest ? TREND : TREND + 1);
	CHECK_EQ(stats_of(w).read_requests, TREND + 1);
}
