/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Hedged reads: a read whose donor takes too long is answered by the backup, or by the donor if it
 * is faster after all; and whoever comes second touches nothing.
 */
#include "engine_fixture.h"

#define POISON  0x77
#define HEDGE_N 64u /* staging buffers */

#define NOT_SLOW(w, r, n) CHECK_EQ(step(w, ISW_STEP_REMOTE_SLOW, r, n), 0)

/* `pages` pages of slab 0, page i holding 10 + i, are on donor 0 and on the backup. */
static struct world *world_hedging(uint32_t flags, uint32_t pages)
{
	struct world *w = WORLD_BUT(config.flags = flags; config.staging_pages = HEDGE_N;
				    config.hedge_us_min = 5000);

	CHECK_EQ(remote_new(w), 0);
	map(w, 0, 0);
	write_settled(w, 0, pages, 10);
	return w;
}

/* ------------------------------------- a read into memory that the test can look at later */

struct own {
	struct iswi_req req;
	bool done;
	int error;
	_Alignas(ISW_PAGE_BYTES) unsigned char data[REQUEST_PAGES_MAX * ISW_PAGE_BYTES];
};

static void own_done(struct iswi_req *req, int error)
{
	struct own *own = ISWI_CONTAINER(req, struct own, req);

	CHECK(!own->done);
	own->done = true;
	own->error = error;
}

static struct own *own_read(struct world *w, uint64_t page, uint32_t pages)
{
	struct own *own = aligned_alloc(ISW_PAGE_BYTES, sizeof(*own));

	CHECK(own);
	memset(own, 0, sizeof(*own));
	memset(own->data, 0xa5, sizeof(own->data));
	own->req = (struct iswi_req){
		.op = ISWI_READ,
		.offset = page * ISW_PAGE_BYTES,
		.length = pages * ISW_PAGE_BYTES,
		.data = own->data,
		.done = own_done,
	};
	iswi_engine_submit(w->e, &own->req);
	return own;
}

/* It is done with these bytes; from now on its memory is somebody else's. */
static void own_is(struct own *own, uint64_t value)
{
	uint64_t pages = own->req.length / ISW_PAGE_BYTES;

	CHECK(own->done);
	CHECK_EQ(own->error, 0);
	for (uint64_t i = 0; i < pages; i++)
		CHECK_EQ(value_at(own->data + i * ISW_PAGE_BYTES), value + i);
	memset(own->data, POISON, sizeof(own->data));
	memset(&own->req, POISON, sizeof(own->req));
}

static void own_end(struct world *w, struct own *own)
{
	world_end(w);
	for (uint64_t i = 0; i < sizeof(own->data); i++)
		CHECK_EQ(own->data[i], POISON);
	for (uint64_t i = 0; i < sizeof(own->req); i++)
		CHECK_EQ(((unsigned char *)&own->req)[i], POISON);
	free(own);
}

/* A test, or one case of several, with an own read of the first `pages` of so many stored ones. */
#define OWN_CASES(name, count, n, stored, pages)                                                   \
	static void name##_in(struct world *w, struct own *own, uint32_t n);                       \
	TEST_CASES(name, count, n)                                                                 \
	{                                                                                          \
		struct world *w = world_hedging(0, stored);                                        \
		struct own *own = own_read(w, 0, pages);                                           \
                                                                                                   \
		name##_in(w, own, n);                                                              \
		own_end(w, own);                                                                   \
	}                                                                                          \
	static void name##_in(struct world *w, struct own *own, UNUSED_OK uint32_t n)
#define OWN_TEST(name, stored, pages) OWN_CASES(name, 1, only, stored, pages)

static void hedges_are(const struct world *w, uint64_t reads, uint64_t wins)
{
	CHECK_EQ(stats_of(w).hedged_reads, reads);
	CHECK_EQ(stats_of(w).hedged_wins, wins);
}

static uint32_t pairs_held(const struct world *w)
{
	return ISWI_PAIRS - (uint32_t)__builtin_popcount(w->e->pairs_free);
}

static uint32_t bare_held(const struct world *w)
{
	return ISWI_BARE - w->e->bare_free;
}

/* The same while all pairs are others'. */
#define BARE_CASES(name, count, n, stored, pages)                                                  \
	static void name##_bare(struct world *w, struct own *own, uint32_t n);                     \
	OWN_CASES(name, count, n, stored, pages)                                                   \
	{                                                                                          \
		w->e->pairs_free = 0;                                                              \
		name##_bare(w, own, n);                                                            \
		settle(w);                                                                         \
		CHECK_EQ(bare_held(w), 0);                                                         \
		w->e->pairs_free = ISWI_PAIRS_ALL;                                                 \
	}                                                                                          \
	static void name##_bare(struct world *w, struct own *own, UNUSED_OK uint32_t n)
#define BARE_TEST(name, stored, pages) BARE_CASES(name, 1, only, stored, pages)

/* ------------------------------------------------------------------- who is first */

OWN_TEST(the_backup_answers_for_a_silent_donor, 4, 4)
{
	SLOW(w, 0, 0);
	NOT_SLOW(w, 0, 0); /* once */
	hedges_are(w, 1, 0);
	DISK_TAKE_READ(w);
	CHECK(!own->done);
	DISK_DONE(w, 0);
	own_is(own, 10);
	hedges_are(w, 1, 1);
	sources_are(w, 0, 4, 0);
	CHECK_EQ(stats_of(w).fallback_slow, 4);
	/* The donor may write into its buffers for as long as it has not answered. */
	CHECK_EQ(slab_of(w, 0).in_flight, 1);
	CHECK_EQ(pairs_held(w), 1);
	REPLY(w, 0, 0);
	CHECK_EQ(slab_of(w, 0).in_flight, 0);
	CHECK_EQ(pairs_held(w), 0);
	CHECK_EQ(stats_of(w).requests_failed, 0);
}

OWN_TEST(the_donor_answers_when_it_is_first, 4, 4)
{
	SLOW(w, 0, 0);
	DISK_TAKE_READ(w);
	REPLY(w, 0, 0);
	own_is(own, 10);
	hedges_are(w, 1, 0);
	sources_are(w, 4, 0, 0);
	CHECK_EQ(slab_of(w, 0).in_flight, 0);
	/* The disk may, too. */
	CHECK_EQ(pairs_held(w), 1);
	DISK_DONE(w, 0);
	CHECK_EQ(pairs_held(w), 0);
	hedges_are(w, 1, 0);
}

OWN_TEST(bytes_that_were_there_already_are_kept, 4, 4)
{
	APPLY(w, 0, 0); /* all of the payload has arrived, its end was not noticed */
	SLOW(w, 0, 0);
	REPLY(w, 0, 0);
	own_is(own, 10);
	sources_are(w, 4, 0, 0);
}

TEST(other_parts_of_the_request_are_not_waited_for_twice)
{
	struct world *w = world_hedging(0, 4);
	struct own *own;

	CHECK_EQ(put(w, 1, 1, 11) != 0, 1); /* staged: two transfers, around it */
	own = own_read(w, 0, 4);
	CHECK_EQ(sent_for(w, 0, 0, ISWI_XFER_READ), 1);
	CHECK_EQ(sent_for(w, 0, 2, ISWI_XFER_READ), 1);
	SLOW(w, 0, 1);
	CHECK_EQ(step(w, ISW_STEP_BACKUP_TAKE, 1, 0), 1);
	DISK_DONE(w, 0);
	CHECK(!own->done);
	SLOW(w, 0, 2);
	CHECK_EQ(step(w, ISW_STEP_BACKUP_TAKE, 1, 0), 1);
	DISK_DONE(w, 0);
	own_is(own, 10);
	hedges_are(w, 2, 2);
	sources_are(w, 0, 3, 1);
	own_end(w, own);
}

/* ------------------------------------------------------------- writes that pass by */

/* Both legs carry old bytes, and the newer ones are staged. */
OWN_CASES(a_write_passes_by, 2, donor_first, 2, 1)
{
	SLOW(w, 0, 0);
	APPLY(w, 0, 0);
	put(w, 0, 1, 500);
	DISK_TAKE_READ(w);
	if (donor_first)
		REPLY(w, 0, 0);
	else
		DISK_DONE(w, 0);
	CHECK(!own->done);
	if (donor_first)
		DISK_DONE(w, 0);
	else
		REPLY(w, 0, 0);
	own_is(own, 500);
	sources_are(w, 0, 0, 1);
	CHECK_EQ(stats_of(w).crc_errors_remote + stats_of(w).crc_errors_backup, 0);
	settle(w);
	CHECK_EQ(read_settled(w, 0), 500);
}

OWN_TEST(a_write_of_another_page_passes_by, 2, 1)
{
	SLOW(w, 0, 0);
	APPLY(w, 0, 0);
	write_settled(w, 1, 1, 99);
	own_is(own, 10); /* settled */
}

/* The donor's leg is older than the page, the backup's is not. */
OWN_TEST(a_write_passes_by_to_its_end, 2, 1)
{
	SLOW(w, 0, 0);
	APPLY(w, 0, 0);
	put(w, 0, 1, 500);
	REPLY(w, 0, 1); /* the write */
	DISK_WRITE(w);
	CHECK(is_backup_current(w, 0) && is_remote_valid(w, 0));
	REPLY(w, 0, 0);
	CHECK(!own->done);
	DISK_READ(w);
	own_is(own, 500);
	hedges_are(w, 1, 1);
}

OWN_TEST(a_trim_passes_by, 2, 1)
{
	SLOW(w, 0, 0);
	trim(w, 0, 1);
	DISK_READ(w);
	own_is(own, 10); /* it was asked for before */
	CHECK_EQ(read_settled(w, 0), 0);
}

/* ------------------------------------------------------------------------- failures */

OWN_CASES(the_donor_goes_down, 2, disk_first, 2, 2)
{
	SLOW(w, 0, 0);
	DISK_TAKE_READ(w);
	if (disk_first)
		DISK_DONE(w, 0);
	BREAK(w, 0);
	CHECK_EQ(own->done, disk_first);
	if (!disk_first)
		DISK_DONE(w, 0);
	own_is(own, 10);
	hedges_are(w, 1, 1);
	CHECK_EQ(slab_of(w, 0).in_flight, 0);
	CHECK_EQ(pairs_held(w), 0);
	CHECK_EQ(w->e->remotes[0].owed, 0);
	donor_returns(w, 0);
	CHECK_EQ(read_settled(w, 0), 10);
}

OWN_CASES(the_backup_fails, 2, disk_first, 2, 2)
{
	SLOW(w, 0, 0);
	DISK_TAKE_READ(w);
	if (!disk_first)
		REPLY(w, 0, 0);
	DISK_FAIL(w, 0);
	CHECK_EQ(own->done, !disk_first);
	if (disk_first)
		REPLY(w, 0, 0);
	own_is(own, 10);
	hedges_are(w, 1, 0);
	CHECK_EQ(stats_of(w).backup_errors, 1);
}

/* Neither is asked a second time: there is nobody left to ask. */
WORLD_CASES(both_fail, 2, disk_first, world_hedging(0, 2))
{
	struct own *own = own_read(w, 0, 2);

	SLOW(w, 0, 0);
	DISK_TAKE_READ(w);
	if (disk_first)
		DISK_FAIL(w, 0);
	REFUSE(w, 0, 0);
	if (!disk_first)
		DISK_FAIL(w, 0);
	CHECK(own->done);
	CHECK_EQ(own->error, -EIO);
	CHECK_EQ(sent(w, 0), 0);
	CHECK_EQ(pairs_held(w), 0);
	free(own);
}

OWN_TEST(a_donors_wrong_bytes_do_not_win, 2, 2)
{
	SLOW(w, 0, 0);
	CORRUPT(w, 0, 0);
	CHECK(!own->done);
	DISK_READ(w);
	own_is(own, 10);
}

OWN_TEST(the_backups_wrong_bytes_do_not_win, 2, 2)
{
	SLOW(w, 0, 0);
	DISK_TAKE_READ(w);
	iswi_sim_of(w->e)->disk[ISW_PAGE_BYTES + 9] ^= 1;
	DISK_DONE(w, 0);
	CHECK(!own->done);
	REPLY(w, 0, 0);
	own_is(own, 10);
	sources_are(w, 2, 0, 0);
}

/* Then the page is read anew, by the rules of any other read, and not hedged again. */
OWN_TEST(wrong_bytes_of_both_are_read_anew, 2, 2)
{
	SLOW(w, 0, 0);
	DISK_TAKE_READ(w);
	iswi_sim_of(w->e)->disk[9] ^= 1;
	DISK_DONE(w, 0);
	CORRUPT(w, 0, 0);
	CHECK(!own->done);
	CHECK_EQ(sent(w, 0), 1);
	NOT_SLOW(w, 0, 0);
	REPLY(w, 0, 0);
	own_is(own, 10);
	hedges_are(w, 1, 0);
	sources_are(w, 2, 0, 0);
}

/* --------------------------------------------------------------- when there is none */

OWN_TEST(none_when_a_page_is_staged, 2, 2)
{
	put(w, 1, 1, 11);
	DISK_WRITE(w);
	CHECK(is_backup_current(w, 1)); /* the donor has not got it yet */
	SLOW(w, 0, 0);                  /* asked, in vain */
	hedges_are(w, 0, 0);
	REPLY(w, 0, 0);
	own_is(own, 10);
}

enum none { OFF, NO_BACKUP, NOT_ON_THE_BACKUP, NONE_CASES };

/* The read waits for its donor, and the transfer is still into the request. */
TEST_CASES(none_of_what_the_backup_lacks_or_when_it_is_off, NONE_CASES, why)
{
	struct world *w = why == OFF
				  ? world_holding(0, 0, 2, 10)
				  : world_hedging(why == NO_BACKUP ? ISW_ENGINE_NO_BACKUP : 0, 2);
	struct own *own;

	if (why == NOT_ON_THE_BACKUP)
		iswi_backup_current_clear(w->e, 1);
	own = own_read(w, 0, 2);
	step(w, ISW_STEP_REMOTE_SLOW, 0, 0);
	hedges_are(w, 0, 0);
	CHECK_EQ(pairs_held(w), w->e->has_backup && w->e->config.hedge_us_min ? 0 : ISWI_PAIRS);
	CHECK(iswi_sim_of(w->e)->donors[0]->pending[0].xfer->buf == own->data);
	REPLY(w, 0, 0);
	own_is(own, 10);
	own_end(w, own);
}

/* Something was missing when the read became slow: that is asked for again after a while. */
OWN_TEST(a_hedge_begins_when_the_page_is_on_the_backup, 2, 2)
{
	put(w, 1, 1, 11);
	SLOW(w, 0, 0);
	hedges_are(w, 0, 0);
	CHECK_EQ(w->e->remotes[0].owed, 1);
	DISK_WRITE(w);
	REPLY(w, 0, 1); /* the write: it is staged no longer */
	SLOW(w, 0, 0);
	hedges_are(w, 1, 0);
	CHECK_EQ(w->e->remotes[0].owed, 1);
	DISK_READ(w);
	own_is(own, 10);
}

BARE_TEST(a_hedge_begins_when_others_have_ended, 2, 2)
{
	w->e->bare_free = 0;
	SLOW(w, 0, 0);
	hedges_are(w, 0, 0);
	w->e->bare_free = ISWI_BARE;
	SLOW(w, 0, 0);
	hedges_are(w, 1, 0);
	DISK_READ(w);
	own_is(own, 10);
}

/* ------------------------------------------------------------------ others meanwhile */

OWN_TEST(unmap_waits_for_the_donors_leg, 2, 2)
{
	SLOW(w, 0, 0);
	unmap(w);
	DISK_READ(w);
	own_is(own, 10);
	CHECK_EQ(w->events[ISW_EVENT_SLAB_DRAINED], 0);
	CHECK_EQ(slab_of(w, 0).state, ISW_SLAB_DRAINING);
	REPLY(w, 0, 0);
	CHECK_EQ(w->events[ISW_EVENT_SLAB_DRAINED], 1);
	CHECK_EQ(read_settled(w, 0), 10);
}

OWN_TEST(unmap_does_not_wait_for_the_backups_leg, 2, 2)
{
	SLOW(w, 0, 0);
	REPLY(w, 0, 0);
	unmap(w);
	CHECK_EQ(w->events[ISW_EVENT_SLAB_DRAINED], 1);
	own_is(own, 10);
}

/* Neither waits for the other. */
OWN_TEST(all_staging_is_for_writes, 8, 8)
{
	for (uint32_t i = 0; i < HEDGE_N / 8; i++)
		put(w, 8 + 8 * (i % 3), 8, 100 * i);
	CHECK_EQ(stats_of(w).staging_pages_used, HEDGE_N);
	CHECK_EQ(stats_of(w).staging_waits, 0);
	SLOW(w, 0, 0);
	hedges_are(w, 1, 0);
	DISK_READ(w);
	own_is(own, 10);
	settle(w);
	CHECK_EQ(read_settled(w, 8), 600);
}

OWN_TEST(legs_are_not_waited_for_by_settle, 2, 2)
{
	SLOW(w, 0, 0);
	CHECK_EQ(isw_engine_settle(w->e, 0), 0);
	settle(w);
	own_is(own, 10);
}

/* The owner of the memory destroys the engine while the donor's leg is still out. */
TEST_CASES(the_engine_ends_meanwhile, 2, disk_first)
{
	struct world *w = world_hedging(0, 2);
	struct own *own = own_read(w, 0, 2);

	SLOW(w, 0, 0);
	DISK_TAKE_READ(w);
	if (disk_first)
		DISK_DONE(w, 0);
	else
		REPLY(w, 0, 0);
	own_is(own, 10);
	isw_engine_destroy(w->e);
	free(w);
	for (uint64_t i = 0; i < sizeof(own->data); i++)
		CHECK_EQ(own->data[i], POISON);
	free(own);
}

/* --------------------------------------------------------------- without any buffers */

static const void *donors_buffer(const struct world *w, uint32_t n)
{
	return iswi_sim_of(w->e)->donors[0]->pending[n].xfer->buf;
}

BARE_CASES(the_backup_answers_a_bare_hedge, 2, arrived, 4, 4)
{
	if (arrived)
		APPLY(w, 0, 0);
	SLOW(w, 0, 0);
	NOT_SLOW(w, 0, 0);
	CHECK(!donors_buffer(w, 0));
	CHECK_EQ(w->e->remotes[0].owed, 1);
	DISK_READ(w);
	own_is(own, 10);
	hedges_are(w, 1, 1);
	sources_are(w, 0, 4, 0);
	CHECK_EQ(slab_of(w, 0).in_flight, 1);
	REPLY(w, 0, 0);
	CHECK_EQ(sent(w, 0), 0);
	CHECK_EQ(slab_of(w, 0).in_flight, 0);
	CHECK_EQ(w->e->remotes[0].owed, 0);
}

/* The disk hangs; the donor, which owes more such answers, is believed to be back. */
BARE_CASES(a_donor_that_answers_late_is_asked_again, 2, owes_more, 4, 4)
{
	uint32_t more = owes_more ? ISWI_OWED_MAX : 0;

	w->e->remotes[0].owed += more;
	SLOW(w, 0, 0);
	DISK_TAKE_READ(w);
	REPLY(w, 0, 0);
	CHECK(!own->done);
	CHECK_EQ(sent_for(w, 0, 0, ISWI_XFER_READ), 1);
	CHECK(donors_buffer(w, 0) == own->data);
	REPLY(w, 0, 0);
	own_is(own, 10);
	hedges_are(w, 1, 0);
	sources_are(w, 4, 0, 0);
	CHECK_EQ(bare_held(w), 1);
	DISK_DONE(w, 0);
	CHECK_EQ(bare_held(w), 0);
	w->e->remotes[0].owed -= more;
}

/* It answers one read and hangs again: that read is hedged once more, a while later. */
BARE_TEST(a_donor_that_hangs_again_is_not_waited_for, 4, 4)
{
	SLOW(w, 0, 0);
	DISK_TAKE_READ(w);
	iswi_sim_of(w->e)->now_ns += 20000000;
	REPLY(w, 0, 0);
	CHECK(iswi_sim_of(w->e)->donors[0]->pending[0].xfer->slow_us >= 40000);
	SLOW(w, 0, 0);
	hedges_are(w, 2, 0);
	CHECK_EQ(bare_held(w), 2);
	DISK_TAKE_READ(w);
	DISK_DONE(w, 1);
	own_is(own, 10);
	hedges_are(w, 2, 1);
}

BARE_CASES(a_write_passes_a_bare_hedge, 2, donor_first, 2, 1)
{
	SLOW(w, 0, 0);
	put(w, 0, 1, 500);
	DISK_TAKE_READ(w);
	if (!donor_first)
		DISK_DONE(w, 0);
	CHECK(!own->done);
	REPLY(w, 0, 0);
	own_is(own, 500);
	sources_are(w, 0, 0, 1);
}

enum fails { DISK_THEN_ANSWER, DONOR_THEN_DISK, DISK_AFTER_ANSWER, BOTH_ORDERS };

BARE_CASES(one_leg_of_a_bare_hedge_fails, BOTH_ORDERS, how, 2, 2)
{
	SLOW(w, 0, 0);
	DISK_TAKE_READ(w);
	if (how == DISK_THEN_ANSWER)
		DISK_FAIL(w, 0);
	if (how == DONOR_THEN_DISK)
		REFUSE(w, 0, 0);
	else
		REPLY(w, 0, 0);
	CHECK(!own->done);
	CHECK_EQ(sent(w, 0), how != DONOR_THEN_DISK);
	if (how == DONOR_THEN_DISK)
		DISK_DONE(w, 0);
	if (how == DISK_AFTER_ANSWER)
		DISK_FAIL(w, 0);
	settle(w);
	own_is(own, 10);
}

WORLD_CASES(both_legs_of_a_bare_hedge_fail, 2, disk_first, world_hedging(0, 2))
{
	struct own *own = own_read(w, 0, 2);

	w->e->pairs_free = 0;
	SLOW(w, 0, 0);
	DISK_TAKE_READ(w);
	if (disk_first)
		DISK_FAIL(w, 0);
	REFUSE(w, 0, 0);
	if (!disk_first)
		DISK_FAIL(w, 0);
	CHECK(own->done);
	CHECK_EQ(own->error, -EIO);
	CHECK_EQ(sent(w, 0), 0);
	CHECK_EQ(bare_held(w), 0);
	w->e->pairs_free = ISWI_PAIRS_ALL;
	free(own);
}

BARE_CASES(the_donor_of_a_bare_hedge_goes_down, 2, disk_first, 2, 2)
{
	SLOW(w, 0, 0);
	DISK_TAKE_READ(w);
	if (disk_first)
		DISK_DONE(w, 0);
	BREAK(w, 0);
	CHECK_EQ(own->done, disk_first);
	if (!disk_first)
		DISK_DONE(w, 0);
	own_is(own, 10);
	hedges_are(w, 1, 1);
	CHECK_EQ(w->e->remotes[0].owed, 0);
}

BARE_TEST(the_backups_wrong_bytes_do_not_win_bare, 2, 2)
{
	SLOW(w, 0, 0);
	DISK_TAKE_READ(w);
	iswi_sim_of(w->e)->disk[ISW_PAGE_BYTES + 9] ^= 1;
	DISK_DONE(w, 0);
	CHECK(!own->done);
	REPLY(w, 0, 0);
	REPLY(w, 0, 0);
	own_is(own, 10);
	sources_are(w, 2, 0, 0);
}

#define LARGE_PAGES 64u /* 256 KiB */
#define LARGE_READS 40u

/*
 * Whatever their size and number: both legs' buffers of these would be 20 MiB, the donor's until it
 * answers.
 */
TEST(large_reads_of_a_silent_donor_are_all_answered)
{
	struct world *w =
		WORLD_BUT(config.size_bytes = LARGE_PAGES * ISW_PAGE_BYTES;
			  config.slab_bytes = config.size_bytes;
			  config.request_bytes_max = LARGE_PAGES * ISW_PAGE_BYTES;
			  config.staging_pages = 4 * LARGE_PAGES; config.hedge_us_min = 5000);
	unsigned char *data[LARGE_READS];
	struct own own[LARGE_READS] = {0};

	CHECK_EQ(remote_new(w), 0);
	map(w, 0, 0);
	for (uint32_t page = 0; page < LARGE_PAGES; page += REQUEST_PAGES_MAX)
		write_settled(w, page, REQUEST_PAGES_MAX, 10 + page);
	for (uint32_t i = 0; i < LARGE_READS; i++) {
		data[i] = aligned_alloc(ISW_PAGE_BYTES, LARGE_PAGES * ISW_PAGE_BYTES);
		own[i].req = (struct iswi_req){
			.op = ISWI_READ,
			.length = LARGE_PAGES * ISW_PAGE_BYTES,
			.data = data[i],
			.done = own_done,
		};
		iswi_engine_submit(w->e, &own[i].req);
	}
	CHECK_EQ(sent(w, 0), LARGE_READS);
	for (uint32_t i = 0; i < LARGE_READS; i++)
		SLOW(w, 0, i);
	disk_settle(w);
	hedges_are(w, LARGE_READS, LARGE_READS);
	for (uint32_t i = 0; i < LARGE_READS; i++) {
		CHECK(own[i].done);
		CHECK_EQ(own[i].error, 0);
		for (uint32_t page = 0; page < LARGE_PAGES; page++)
			CHECK_EQ(value_at(data[i] + page * ISW_PAGE_BYTES), 10 + page);
		memset(data[i], POISON, LARGE_PAGES * ISW_PAGE_BYTES);
	}
	settle(w);
	for (uint32_t i = 0; i < LARGE_READS; i++) {
		for (uint32_t byte = 0; byte < LARGE_PAGES * ISW_PAGE_BYTES; byte++)
			CHECK_EQ(data[i][byte], POISON);
		free(data[i]);
	}
	world_end(w);
}

/* ------------------------------------------------------------- a donor that is silent */

WORLD_TEST(a_silent_donor_is_passed_by_until_it_answers, world_hedging(0, 4))
{
	uint32_t id;

	for (uint32_t i = 0; i < ISWI_OWED_MAX; i++) {
		id = get(w, 0, 1);
		CHECK_EQ(sent(w, 0), i + 1);
		SLOW(w, 0, i);
		DISK_READ(w);
		GOT(w, id, 10);
	}
	hedges_are(w, ISWI_OWED_MAX, ISWI_OWED_MAX);
	/* Straight from the backup, but for the page that it lacks. */
	iswi_backup_current_clear(w->e, 1);
	id = get(w, 0, 3);
	CHECK_EQ(sent(w, 0), ISWI_OWED_MAX + 1);
	CHECK_EQ(sent_for(w, 0, 1, ISWI_XFER_READ), 1);
	DISK_TAKE_READ(w);
	DISK_READ(w);
	DISK_DONE(w, 0);
	REPLY(w, 0, ISWI_OWED_MAX);
	CHECK_EQ(w->error[id], 0);
	for (uint64_t i = 0; i < 3; i++)
		CHECK_EQ(w->got[id][i], 10 + i);
	CHECK_EQ(stats_of(w).fallback_slow, ISWI_OWED_MAX + 2);
	hedges_are(w, ISWI_OWED_MAX, ISWI_OWED_MAX);
	/* The disk fails: the donor is asked after all. */
	id = get(w, 0, 1);
	DISK_TAKE_READ(w);
	DISK_FAIL(w, 0);
	CHECK_EQ(sent(w, 0), ISWI_OWED_MAX + 1);
	CHECK_EQ(w->error[id], PENDING);
	/* One answer of those it owes. */
	REPLY(w, 0, 0);
	get(w, 3, 1);
	CHECK_EQ(sent_for(w, 0, 3, ISWI_XFER_READ), 1);
	END_WELL(w, id);
	CHECK_EQ(w->e->remotes[0].owed, 0);
}

static uint64_t tail_of(const struct world *w)
{
	return remote_of(w, 0).read_tail_ns;
}

/* One answer in `rare` takes that long, the others 100 us; one after the other. */
static void answers(struct iswi_remote *r, uint64_t *now_ns, uint32_t count, uint32_t rare,
		    uint64_t rare_ns)
{
	for (uint32_t i = 0; i < count; i++) {
		uint64_t submitted_ns = *now_ns;

		*now_ns += i % rare ? 100000 : rare_ns;
		iswi_remote_note_read(r, submitted_ns, *now_ns);
	}
}

WORLD_TEST(the_tail_follows_the_donor, world_hedging(0, 1))
{
	struct iswi_remote *r = &w->e->remotes[0];
	uint64_t now_ns = 1, hung_ns, before;

	CHECK_EQ(tail_of(w), 0);
	CHECK_EQ(iswi_remote_slow_after_us(w->e, r), 5000); /* the least */
	/* One answer in 50 takes 20 ms: that is this donor's tail. */
	answers(r, &now_ns, 20000, 50, 20000000);
	CHECK(tail_of(w) > 15000000 && tail_of(w) <= 20000000);
	CHECK(iswi_remote_slow_after_us(w->e, r) > 60000 &&
	      iswi_remote_slow_after_us(w->e, r) <= 80000);
	/* One in 1000 is not. */
	answers(r, &now_ns, 20000, 1000, 20000000);
	before = tail_of(w);
	CHECK(before < 500000);
	/* Nor is what comes all at once after a hang. */
	hung_ns = now_ns;
	now_ns += 1900000000;
	for (uint32_t i = 0; i < 100; i++)
		iswi_remote_note_read(r, hung_ns + i, now_ns + i);
	CHECK(tail_of(w) > before && tail_of(w) < before + before / 4);
	/* There is an end to the waiting. */
	answers(r, &now_ns, 1000, 1, 1900000000);
	CHECK_EQ(tail_of(w), 1900000000);
	CHECK_EQ(iswi_remote_slow_after_us(w->e, r), 250000);
	/* Real reads are noted, writes and errors are not. */
	atomic_store(&r->read_tail_ns, 0);
	write_settled(w, 0, 1, 10);
	get(w, 0, 1);
	REFUSE(w, 0, 0);
	settle(w);
	CHECK_EQ(tail_of(w), 0);
	CHECK_EQ(read_settled(w, 0), 10);
	CHECK(tail_of(w) > 0);
	/* The next donor of that number begins anew. */
	unmap(w);
	CHECK_EQ(isw_remote_destroy(w->e, 0), 0);
	reap(w);
	CHECK_EQ(remote_new(w), 0);
	CHECK_EQ(tail_of(w), 0);
}
