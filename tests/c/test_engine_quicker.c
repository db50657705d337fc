/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The quicker source: a page that a donor and the backup both have is read from where it comes
 * sooner (R16), the slower one is measured now and then, and no copy that may not be read ever is.
 */
#include "engine_fixture.h"

#define US    1000ull
#define VALUE 100u /* of page 0; page i of slab 0 holds VALUE + i */

/* --------------------------------------------------------------------- expectations */

/* A read of that many pages, alone, that takes so long. */
static void took(struct iswi_speed *s, uint32_t pages, uint64_t us)
{
	uint8_t load = iswi_speed_begin(s, pages);

	iswi_speed_end(s, pages);
	iswi_speed_took(s, load, us * US);
}

static uint64_t expected_us(const struct iswi_speed *s, uint32_t pages)
{
	return iswi_speed_expected_ns(s, pages) / US;
}

TEST(an_expectation_moves_by_a_quarter_of_the_difference)
{
	struct iswi_speed s = {0};

	CHECK_EQ(expected_us(&s, 1), 0);
	took(&s, 1, 80);
	CHECK_EQ(expected_us(&s, 1), 80);
	took(&s, 1, 40);
	CHECK_EQ(expected_us(&s, 1), 70);
	took(&s, 1, 110);
	CHECK_EQ(expected_us(&s, 1), 80);
	took(&s, 1, 500000); /* an outlier */
	CHECK_EQ(expected_us(&s, 1), 80 + 80 / 4);
	/* What has become slow for good is known soon, and so is the opposite. */
	for (uint32_t i = 0; i < 40; i++)
		took(&s, 1, 20000);
	CHECK(expected_us(&s, 1) > 18000 && expected_us(&s, 1) <= 20000);
	for (uint32_t i = 0; i < 36; i++)
		took(&s, 1, 20);
	CHECK(expected_us(&s, 1) < 40);
	/* From nothing it still rises. */
	for (uint32_t i = 0; i < 100; i++)
		took(&s, 1, 0);
	for (uint32_t i = 0; i < 100; i++)
		took(&s, 1, 100);
	CHECK(expected_us(&s, 1) > 90);
	iswi_speed_forget(&s);
	CHECK_EQ(expected_us(&s, 1), 0);
}

TEST(what_is_under_way_counts)
{
	struct iswi_speed s = {0};

	took(&s, 1, 30);
	took(&s, 8, 100);
	CHECK_EQ(expected_us(&s, 1), 30);
	CHECK_EQ(expected_us(&s, 2), 60); /* at most twice the time */
	CHECK_EQ(expected_us(&s, 5), 100);
	CHECK_EQ(expected_us(&s, 32), 400);
	iswi_speed_begin(&s, 5);
	CHECK_EQ(expected_us(&s, 1), 100);
	CHECK_EQ(expected_us(&s, 1000), 1600); /* the last load */
	iswi_speed_end(&s, 5);
	CHECK_EQ(expected_us(&s, 1), 30);
	iswi_speed_forget(&s);
	took(&s, 16, 200);
	CHECK_EQ(expected_us(&s, 1), 200); /* no more than with others */
}

TEST(more_pages_never_take_less)
{
	struct iswi_speed s = {0};

	took(&s, 1, 30);
	took(&s, 8, 100);
	for (uint32_t i = 0; i < 20; i++)
		took(&s, 1, 1000);
	CHECK(expected_us(&s, 1) > 900);
	CHECK_EQ(expected_us(&s, 8), expected_us(&s, 1));
	for (uint32_t i = 0; i < 20; i++)
		took(&s, 8, 50);
	CHECK(expected_us(&s, 8) < 60);
	CHECK_EQ(expected_us(&s, 1), expected_us(&s, 8));
}

/* A quick answer tells of larger loads, too: nobody may be asking at those any more. */
TEST(a_larger_load_recovers_with_a_smaller_one)
{
	struct iswi_speed s = {0};

	for (uint32_t pages = 1; pages <= 128; pages *= 2)
		took(&s, pages, 100000);
	for (uint32_t i = 0; i < 60; i++)
		took(&s, 1, 20);
	CHECK(expected_us(&s, 1) < 30);
	CHECK(expected_us(&s, 8) < 30 * 8);
	CHECK(expected_us(&s, 128) < 30 * 128);
}

/* How long it has taken until now is the least that it takes. */
TEST(a_read_without_an_answer_tells_only_what_it_takes_at_least)
{
	struct iswi_speed s = {0};

	took(&s, 1, 1000);
	iswi_speed_unanswered(&s, 0, 400 * US);
	CHECK_EQ(expected_us(&s, 1), 1000);
	iswi_speed_unanswered(&s, 0, 1400 * US);
	CHECK_EQ(expected_us(&s, 1), 1100);
}

/* It is not asked soon again, however quick it was. */
TEST(a_read_that_failed_was_slow)
{
	struct iswi_speed s = {0};

	took(&s, 1, 50);
	took(&s, 128, 5000000);
	iswi_speed_failed(&s, 100 * US);
	CHECK_EQ(expected_us(&s, 1), ISWI_SPEED_FAILED_NS / US);
	CHECK_EQ(expected_us(&s, 8), ISWI_SPEED_FAILED_NS / US);
	CHECK_EQ(expected_us(&s, 128), 5000000);
	iswi_speed_failed(&s, 30000000 * US);
	CHECK_EQ(expected_us(&s, 1), 30000000);
}

TEST(a_donor_wins_a_tie_and_is_asked_once)
{
	struct iswi_speed donor = {.measure_ns = 1}, backup = {.measure_ns = 1};

	took(&backup, 1, 10);
	CHECK_EQ(iswi_speed_choose(&donor, &backup, 1, 0), ISWI_SPEED_DONOR);
	took(&donor, 1, 100);
	CHECK_EQ(iswi_speed_choose(&donor, &backup, 1, 0), ISWI_SPEED_BACKUP);
	/* Never asked for two pages, which the backup has sooner than it has one, ... */
	CHECK_EQ(iswi_speed_choose(&donor, &backup, 2, 0), ISWI_SPEED_BACKUP);
	CHECK_EQ(iswi_speed_choose(&donor, &backup, 8, 0), ISWI_SPEED_DONOR); /* ... or may not */
	iswi_speed_forget(&backup);
	took(&backup, 1, 76);
	backup.measure_ns = 1;
	CHECK_EQ(iswi_speed_choose(&donor, &backup, 1, 0), ISWI_SPEED_DONOR);
	CHECK_EQ(iswi_speed_choose(&donor, &backup, 1, 1), ISWI_SPEED_BACKUP_MEASURED);
}

TEST(one_measures_at_a_time_and_then_there_is_a_pause)
{
	struct iswi_speed s = {0};

	CHECK(iswi_speed_measure(&s, 5));
	CHECK(!iswi_speed_measure(&s, UINT64_MAX - 1));
	iswi_speed_measured(&s, 1000, 3000);
	CHECK(!iswi_speed_measure(&s, 3000 + 2000 * ISWI_SPEED_MEASURE - 1));
	CHECK(iswi_speed_measure(&s, 3000 + 2000 * ISWI_SPEED_MEASURE));
	iswi_speed_measured(&s, 0, 3600000000000ull); /* as with a disk that hung for an hour */
	CHECK(iswi_speed_measure(&s, 3600000000000ull + ISWI_SPEED_PAUSE_NS));
}

/* ------------------------------------------------------------- one fault after another */

struct faults {
	struct iswi_speed donor, backup;
	uint64_t now_ns, random, from_backup;
	bool is_steady; /* the donor: it always takes the same */
};

/* Half to one and a half times as long, and now and then ten times. */
static uint64_t noisy(struct faults *f, uint64_t us)
{
	f->random = f->random * 6364136223846793005ull + 1442695040888963407ull;
	return us * US * (512 + (f->random >> 54)) / 1024 * ((f->random >> 33) % 100 ? 1 : 10);
}

/* So many, each with both sources that fast; returns how long they took, in ns. */
static uint64_t run(struct faults *f, uint32_t count, uint64_t donor_us, uint64_t backup_us)
{
	uint64_t began_ns = f->now_ns;

	f->from_backup = 0;
	for (uint32_t i = 0; i < count; i++) {
		enum iswi_speed_choice choice =
			iswi_speed_choose(&f->donor, &f->backup, 1, f->now_ns);
		bool backup = iswi_speed_is_backup(choice);
		struct iswi_speed *s = backup ? &f->backup : &f->donor;
		uint64_t ns = f->is_steady && !backup ? donor_us * US
						      : noisy(f, backup ? backup_us : donor_us);
		uint64_t sent_ns = f->now_ns;
		bool measures = (choice == ISWI_SPEED_DONOR_MEASURED ||
				 choice == ISWI_SPEED_BACKUP_MEASURED) &&
				iswi_speed_measure(s, sent_ns);
		uint8_t load = iswi_speed_begin(s, 1);

		f->now_ns += ns;
		f->from_backup += backup;
		iswi_speed_end(s, 1);
		iswi_speed_took(s, load, ns);
		if (measures)
			iswi_speed_measured(s, sent_ns, f->now_ns);
	}
	return f->now_ns - began_ns;
}

/* Whatever both take, the faults take hardly longer than with the better one alone. */
TEST(faults_take_no_longer_than_with_the_better_source)
{
	static const uint64_t us[] = {20, 45, 60, 100, 330, 2000, 20000};

	for (uint32_t d = 0; d < ISWI_ARRAY_LEN(us); d++)
		for (uint32_t b = 0; b < ISWI_ARRAY_LEN(us); b++) {
			struct faults f = {.random = 1 + d * 8 + b}, alone = {.random = 77};
			/* A tie, or nearly: the donor does it. */
			bool is_tie = us[d] * 3 <= us[b] * 4 && us[d] > us[b];
			uint64_t best_ns = 0, both_ns;

			run(&f, 5000, us[d], us[b]); /* they get to know each other */
			both_ns = run(&f, 20000, us[d], us[b]);
			for (uint32_t i = 0; i < 20000; i++)
				best_ns += noisy(&alone, ISWI_MIN(us[d], us[b]));
			CHECK(both_ns < best_ns + best_ns / (is_tie ? 3 : 8));
			if (us[b] >= 2 * us[d])
				CHECK(f.from_backup < 20000 / 20);
			if (us[d] >= 3 * us[b])
				CHECK(f.from_backup > 20000 - 20000 / 20);
		}
}

/* One read of the disk in a hundred takes ten times as long: that is no reason to stay away. */
TEST(an_outlier_does_not_keep_reads_from_the_better_source)
{
	for (uint64_t donor_us = 120; donor_us <= 240; donor_us += 30) {
		struct faults f = {.random = donor_us, .is_steady = true}, alone = {.random = 77};
		uint64_t best_ns = 0, both_ns;

		run(&f, 5000, donor_us, 60);
		both_ns = run(&f, 50000, donor_us, 60);
		for (uint32_t i = 0; i < 50000; i++)
			best_ns += noisy(&alone, 60);
		CHECK(both_ns < best_ns + best_ns / 8);
	}
}

/* A link that was slow and is quick again is used again soon, and the other way round. */
TEST(a_change_is_noticed)
{
	static const uint64_t slow_us[] = {200, 1000, 20000};

	for (uint32_t i = 0; i < ISWI_ARRAY_LEN(slow_us); i++) {
		struct faults f = {.random = i};

		run(&f, 5000, 25, 60);
		run(&f, 100, slow_us[i], 60);
		run(&f, 5000, slow_us[i], 60);
		CHECK(f.from_backup > 4900);
		/* A pause after a slow read, and 20 short ones. */
		f.now_ns += slow_us[i] * US * 15 * ISWI_SPEED_MEASURE;
		run(&f, 20000, 25, 60);
		run(&f, 5000, 25, 60);
		CHECK(f.from_backup < 100);
	}
}

/* ------------------------------------------------------------ many reads at a time */

struct busy {
	struct iswi_pace pace;
	uint64_t now_ns, pages, quicker_pages;
};

/* So many reads of a page; each way has its time for one, and its pages of a hundred from the disk.
 */
static uint64_t read_busily(struct busy *b, uint32_t count, uint64_t donors_us, uint64_t quicker_us,
			    uint32_t backup_share)
{
	uint64_t began_ns = b->now_ns;

	b->quicker_pages = 0;
	for (uint32_t i = 0; i < count; i++) {
		bool donors = iswi_pace_is_donors(&b->pace);

		b->now_ns += (donors ? donors_us : quicker_us) * US;
		b->quicker_pages += !donors;
		iswi_pace_note(&b->pace, 1, !donors && i % 100 < backup_share, b->now_ns);
	}
	return b->now_ns - began_ns;
}

TEST(busy_reads_go_the_way_that_gets_more_of_them_done)
{
	static const struct {
		uint64_t donors_us, quicker_us;
		bool donors;
	} cases[] = {
		{25, 40, true},  {25, 26, true},   {30, 25, true}, /* a tie, or nearly */
		{40, 25, false}, {160, 40, false}, {900, 20, false}, {20, 900, true},
	};
	const uint32_t count = 1000000;

	for (uint32_t i = 0; i < ISWI_ARRAY_LEN(cases); i++) {
		struct busy b = {.now_ns = 1};
		uint64_t best_us = cases[i].donors ? cases[i].donors_us : cases[i].quicker_us;
		uint64_t took_ns;

		read_busily(&b, 30000, cases[i].donors_us, cases[i].quicker_us, 50);
		took_ns = read_busily(&b, count, cases[i].donors_us, cases[i].quicker_us, 50);
		CHECK(took_ns < count * best_us * US * 103 / 100);
		if (cases[i].donors)
			CHECK(b.quicker_pages < count / 40);
		else
			CHECK(b.quicker_pages > count - count / 40);
	}
}

/* The first one comes after four stretches, the next after eight more. */
TEST(a_trial_that_cannot_win_ends_at_once)
{
	struct busy b = {.now_ns = 1};
	const uint32_t count = 12 * ISWI_PACE_PAGES;

	CHECK(read_busily(&b, count, 20, 900, 50) < count * 20 * US * 110 / 100);
	CHECK(b.quicker_pages > 0);
	CHECK_EQ(b.pace.kept, ISWI_PACE_DONORS);
}

TEST(a_change_of_the_better_way_is_noticed)
{
	struct busy b = {.now_ns = 1};

	for (uint32_t i = 0; i < 3; i++) {
		read_busily(&b, 300000, 25, 40, 50);
		read_busily(&b, 100000, 25, 40, 50);
		CHECK(b.quicker_pages < 100000 / 20);
		read_busily(&b, 300000, 160, 40, 50);
		read_busily(&b, 100000, 160, 40, 50);
		CHECK(b.quicker_pages > 100000 - 100000 / 20);
	}
}

/* Both ways are the same then: none is tried, and nothing is lost. */
TEST(a_way_that_asks_the_disk_for_next_to_nothing_is_not_on_trial)
{
	struct busy b = {.now_ns = 1};

	read_busily(&b, 30000, 160, 40, 50);
	read_busily(&b, 300000, 10, 40, 3);
	CHECK_EQ(b.quicker_pages, 300000);
	read_busily(&b, 300000, 10, 40, 12);
	CHECK(b.quicker_pages < 300000);
	/* Nor does it win because the job was quicker meanwhile. */
	read_busily(&b, 300000, 40, 10, 3);
	CHECK(b.quicker_pages < 300000 / 20);
}

/* A job that computes, or sleeps, for ten seconds is not read for, whichever way. */
TEST(a_pause_of_the_job_does_not_count)
{
	struct busy b = {.now_ns = 1};

	read_busily(&b, 30000, 40, 25, 50);
	CHECK_EQ(b.pace.kept, ISWI_PACE_QUICKER);
	for (uint32_t i = 0; i < 1000; i++) {
		read_busily(&b, ISWI_PACE_PAGES, 40, 25, 50);
		CHECK_EQ(b.pace.kept, ISWI_PACE_QUICKER);
		if (!iswi_pace_is_donors(&b.pace))
			b.now_ns += 10000000000ull;
	}
}

/* ------------------------------------------------------------------------ the engine */

/* Pages 0 to 3 of slab 0 are on donor 0 and on the backup. */
static struct world *filled(struct world *w)
{
	CHECK_EQ(remote_new(w), 0);
	map(w, 0, 0);
	write_settled(w, 0, 4, VALUE);
	iswi_sim_of(w->e)->now_ns += 1000000;
	/* Nobody measures, or tries donors alone. */
	w->e->remotes[0].speed.measure_ns = w->e->backup->speed.measure_ns = 1ull << 60;
	w->e->pace.way = w->e->pace.kept = ISWI_PACE_QUICKER;
	w->e->pace.left = UINT32_MAX;
	return w;
}

static struct world *world_quicker(uint32_t flags)
{
	return filled(
		WORLD_BUT(config.flags = ISW_ENGINE_QUICKER | flags; config.hedge_us_min = 5000));
}

static void expect(struct world *w, uint64_t donor_us, uint64_t backup_us)
{
	for (uint32_t load = 0; load < ISWI_SPEED_LOADS; load++) {
		w->e->remotes[0].speed.took_ns[load] = donor_us * US;
		w->e->backup->speed.took_ns[load] = backup_us * US;
	}
}

static struct world *world_slow_link(void)
{
	struct world *w = world_quicker(0);

	expect(w, 1000, 50);
	return w;
}

/* All that was begun has ended. */
static void all_ended(const struct world *w)
{
	CHECK_EQ(w->e->remotes[0].speed.pages, 0);
	CHECK_EQ(w->e->backup->speed.pages, 0);
	CHECK(w->e->remotes[0].speed.measure_ns != ISWI_SPEED_UNDER_WAY);
	CHECK(w->e->backup->speed.measure_ns != ISWI_SPEED_UNDER_WAY);
}

#define QUICKER_TEST(name, make)                                                                   \
	static void name##_in(struct world *w);                                                    \
	TEST(name)                                                                                 \
	{                                                                                          \
		struct world *w = make;                                                            \
                                                                                                   \
		name##_in(w);                                                                      \
		settle(w);                                                                         \
		all_ended(w);                                                                      \
		world_end(w);                                                                      \
	}                                                                                          \
	static void name##_in(struct world *w)

QUICKER_TEST(a_slow_link_is_passed_by, world_slow_link())
{
	uint32_t id;

	CHECK_EQ(remote_of(w, 0).expected_ns, 1000 * US);
	CHECK_EQ(stats_of(w).backup_expected_ns, 50 * US);
	id = get(w, 0, 4);
	CHECK_EQ(sent(w, 0), 0);
	DISK_READ(w);
	GOT(w, id, VALUE);
	sources_are(w, 0, 4, 0);
	CHECK_EQ(stats_of(w).fallback_quicker, 4);
}

QUICKER_TEST(a_quick_link_is_not, world_quicker(0))
{
	expect(w, 40, 50);
	READ_FROM(w, remote, 0, VALUE);
	sources_are(w, 1, 0, 0);
	CHECK(remote_of(w, 0).expected_ns < 40 * US); /* the reply took a step, 1 us */
}

/* While others are in flight, which way is the better one counts, not who answers sooner. */
QUICKER_TEST(beside_other_requests_donors_alone_may_be_the_better_way, world_slow_link())
{
	uint32_t first, second;

	w->e->pace.way = w->e->pace.kept = ISWI_PACE_DONORS;
	first = get(w, 0, 1);
	CHECK_EQ(sent(w, 0), 0); /* alone: the quicker source */
	second = get(w, 1, 1);
	CHECK_EQ(sent(w, 0), 1);
	END_WELL(w, first, second);
	w->e->pace.way = w->e->pace.kept = ISWI_PACE_QUICKER;
	first = get(w, 0, 1);
	second = get(w, 1, 1);
	CHECK_EQ(sent(w, 0), 0);
	END_WELL(w, first, second);
}

QUICKER_TEST(reads_beside_others_make_a_stretch, world_slow_link())
{
	struct iswi_pace *pace = &w->e->pace;
	uint32_t first, second;

	memset(pace, 0, sizeof(*pace));
	pace->left = 1;
	pace->pages = ISWI_PACE_PAGES - 1;
	first = get(w, 0, 1);
	CHECK(iswi_pace_is_donors(pace)); /* it was alone */
	second = get(w, 1, 1);
	CHECK(!iswi_pace_is_donors(pace));
	CHECK_EQ(pace->pages, 0);
	END_WELL(w, first, second);
	/* What is read from the backup then is told, too. */
	first = get(w, 0, 1);
	second = get(w, 1, 2);
	CHECK_EQ(pace->pages, 2);
	CHECK_EQ(pace->backup_pages, 2);
	END_WELL(w, first, second);
}

QUICKER_TEST(without_the_flag_no_source_is_passed_by, world_slow_link())
{
	w->e->config.flags &= ~(uint32_t)ISW_ENGINE_QUICKER;
	READ_FROM(w, remote, 0, VALUE);
}

QUICKER_TEST(a_page_that_is_not_on_the_backup_yet_is_not_read_there, world_slow_link())
{
	uint32_t write = put(w, 1, 1, 500), id = get(w, 0, 3);

	CHECK_EQ(sent_for(w, 0, 0, ISWI_XFER_READ), 0);
	DISK_TAKE_READ(w);
	DISK_TAKE_READ(w);
	CHECK_EQ(step(w, ISW_STEP_BACKUP_TAKE, 1, 0), 0); /* around page 1 */
	END_WELL(w, write, id);
	CHECK_EQ(w->got[id][0], VALUE);
	CHECK_EQ(w->got[id][1], 500);
	CHECK_EQ(w->got[id][2], VALUE + 2);
	sources_are(w, 0, 2, 1);
	READ_FROM(w, backup, 1, 500);
}

QUICKER_TEST(a_write_that_passes_by_is_seen, world_slow_link())
{
	uint32_t id = get(w, 0, 1);

	DISK_TAKE_READ(w);
	put(w, 0, 1, 500);
	DISK_DONE(w, 0);
	READ_ENDS(w, id, 500);
	CHECK_EQ(stats_of(w).crc_errors_backup, 0);
}

QUICKER_TEST(a_disk_that_fails_does_not_fail_the_request, world_slow_link())
{
	uint32_t id;

	expect(w, 10000000, 50); /* still the slower one after it */
	id = get(w, 0, 2);
	DISK_TAKE_READ(w);
	DISK_FAIL(w, 0);
	CHECK_EQ(sent_for(w, 0, 0, ISWI_XFER_READ), 1); /* although it is slow */
	READ_ENDS(w, id, VALUE);
	CHECK_EQ(stats_of(w).pages_in_remote, 2);
}

QUICKER_TEST(a_disk_that_hangs_is_passed_by_in_its_turn, world_quicker(0))
{
	uint32_t ids[4], asked = 0;

	/* It moves a page in 50 us. */
	for (uint32_t load = 0; load < ISWI_SPEED_LOADS; load++)
		w->e->backup->speed.took_ns[load] = (50 * US) << load;
	for (uint32_t load = 0; load < ISWI_SPEED_LOADS; load++)
		w->e->remotes[0].speed.took_ns[load] = 120 * US;
	for (uint32_t i = 0; i < 4; i++) {
		ids[i] = get(w, i, 1);
		asked += sent(w, 0);
	}
	CHECK(asked > 0);
	END_WELL(w, ids[0], ids[1], ids[2], ids[3]);
}

/* ---- a disk that hangs or fails */

static void hedges_are(const struct world *w, uint64_t reads, uint64_t wins)
{
	CHECK_EQ(stats_of(w).hedged_reads, reads);
	CHECK_EQ(stats_of(w).hedged_wins, wins);
}

#define DISK_SLOW(w) CHECK_EQ(step(w, ISW_STEP_BACKUP_SLOW, 0, 0), 1)

/* When the backup is slow the donor is asked, too, and answers; what comes late does no harm. */
QUICKER_TEST(a_disk_that_hangs_holds_up_nothing_that_a_donor_has, world_slow_link())
{
	uint32_t id = get(w, 0, 2);

	DISK_TAKE_READ(w);
	CHECK_EQ(sent(w, 0), 0);
	DISK_SLOW(w);
	CHECK_EQ(step(w, ISW_STEP_BACKUP_SLOW, 0, 0), 0); /* once */
	REPLY(w, 0, 0);
	GOT(w, id, VALUE);
	sources_are(w, 2, 0, 0);
	hedges_are(w, 1, 1);
	/* Until it has answered it is asked for nothing that the donor has, ... */
	id = get(w, 1, 1);
	CHECK_EQ(sent(w, 0), 1);
	REPLY(w, 0, 0);
	GOT(w, id, VALUE + 1);
	DISK_DONE(w, 0);
	/* ... and then it is. */
	expect(w, 1000, 50);
	id = get(w, 2, 1);
	CHECK_EQ(sent(w, 0), 0);
	READ_ENDS(w, id, VALUE + 2);
}

QUICKER_TEST(a_disk_that_hangs_and_fails_is_not_asked_soon_again, world_slow_link())
{
	uint32_t id = get(w, 0, 1);

	DISK_TAKE_READ(w);
	DISK_SLOW(w);
	REPLY(w, 0, 0);
	GOT(w, id, VALUE);
	iswi_sim_of(w->e)->now_ns += 30000000 * US;
	DISK_FAIL(w, 0);
	for (uint32_t i = 0; i < 20; i++)
		READ_FROM(w, remote, 0, VALUE);
	CHECK_EQ(w->e->pairs_free, ISWI_PAIRS_ALL);
}

QUICKER_TEST(the_backup_may_still_be_first, world_slow_link())
{
	uint32_t id = get(w, 0, 1);

	DISK_TAKE_READ(w);
	DISK_SLOW(w);
	DISK_DONE(w, 0);
	GOT(w, id, VALUE);
	sources_are(w, 0, 1, 0);
	hedges_are(w, 1, 0);
	CHECK(w->e->pairs_free != ISWI_PAIRS_ALL); /* the donor may still answer into one */
	REPLY(w, 0, 0);
	CHECK_EQ(w->e->pairs_free, ISWI_PAIRS_ALL);
}

/* Both fail, or bring what was overwritten meanwhile, in either order. */
TEST_CASES(two_legs_in_vain_are_read_again, 2, disk_first)
{
	struct world *w = world_slow_link();
	uint32_t id = get(w, 0, 1), write;

	DISK_TAKE_READ(w);
	DISK_SLOW(w);
	APPLY(w, 0, 0);
	write = put(w, 0, 1, 500);
	if (disk_first)
		DISK_DONE(w, 0);
	REPLY(w, 0, 0);
	GOT(w, id, 500); /* without waiting for a disk that hangs */
	if (!disk_first)
		DISK_DONE(w, 0);
	END_WELL(w, write);
	all_ended(w);
	world_end(w);
}

/* A neighbour was rewritten meanwhile. */
QUICKER_TEST(a_disk_that_hangs_does_not_hold_up_what_is_read_again, world_slow_link())
{
	uint32_t id = get(w, 0, 2), write;

	DISK_TAKE_READ(w);
	DISK_SLOW(w);
	APPLY(w, 0, 0);
	write = put(w, 1, 1, 500);
	REPLY(w, 0, 0);
	remotes_settle(w);
	GOT(w, id, VALUE);
	CHECK_EQ(w->got[id][1], 500);
	END_WELL(w, write);
	CHECK_EQ(w->e->pairs_free, ISWI_PAIRS_ALL);
}

/* Its use of the donor ends with it. */
QUICKER_TEST(an_unmap_waits_for_a_read_that_may_still_be_sent, world_slow_link())
{
	uint32_t id = get(w, 0, 1);

	DISK_TAKE_READ(w);
	CHECK_EQ(isw_slab_unmap(w->e, 0, slab_of(w, 0).remote, slab_of(w, 0).generation), 0);
	CHECK_EQ(slab_of(w, 0).state, ISW_SLAB_DRAINING);
	DISK_SLOW(w);
	REPLY(w, 0, 0);
	GOT(w, id, VALUE);
	CHECK(slab_of(w, 0).state != ISW_SLAB_DRAINING);
}

QUICKER_TEST(many_slow_reads_of_the_disk_do_not_make_a_donor_avoided, world_slow_link())
{
	uint32_t ids[4];

	for (uint32_t i = 0; i < 4; i++)
		ids[i] = get(w, i, 1);
	for (uint32_t i = 0; i < 4; i++)
		DISK_SLOW(w);
	CHECK_EQ(w->e->remotes[0].owed, 0);
	remotes_settle(w);
	CAME_TO(w, 0, ids[0], ids[1], ids[2], ids[3]);
	settle(w);
	CHECK_EQ(w->e->remotes[0].owed, 0);
}

/* As many as there are buffers for; the donor answers the others. */
QUICKER_TEST(without_buffers_for_both_legs_a_page_comes_from_its_donor, world_slow_link())
{
	uint32_t id;

	w->e->pairs_free = 0;
	id = get(w, 0, 1);
	CHECK_EQ(sent(w, 0), 1);
	REPLY(w, 0, 0);
	GOT(w, id, VALUE);
	w->e->backup->speed.measure_ns = 0;
	expect(w, 50, 1000);
	READ_FROM(w, remote, 0, VALUE);
	w->e->pairs_free = ISWI_PAIRS_ALL;
}

/* 16 pairs, each for one read; what is under way then has them. */
QUICKER_TEST(no_two_reads_share_a_pair_of_buffers, world_slow_link())
{
	uint32_t ids[ISWI_PAIRS], last;

	for (uint32_t i = 0; i < ISWI_PAIRS; i++)
		ids[i] = get(w, i % 4, 1);
	CHECK_EQ(sent(w, 0), 0);
	CHECK_EQ(w->e->pairs_free, 0);
	last = get(w, 0, 1);
	CHECK_EQ(sent(w, 0), 1);
	REPLY(w, 0, 0);
	GOT(w, last, VALUE);
	for (uint32_t i = 0; i < ISWI_PAIRS; i++)
		READ_ENDS(w, ids[i], VALUE + i % 4);
	CHECK_EQ(w->e->pairs_free, ISWI_PAIRS_ALL);
}

/* Nobody waits for the answer before it says that the disk is slow. */
QUICKER_TEST(a_slow_read_of_the_disk_tells, world_slow_link())
{
	uint32_t id = get(w, 0, 1);

	iswi_sim_of(w->e)->now_ns += 10000 * US;
	DISK_SLOW(w);
	CHECK_EQ(stats_of(w).backup_expected_ns, 62500); /* as of an outlier */
	READ_ENDS(w, id, VALUE);
}

QUICKER_TEST(a_backup_whose_writes_fail_is_not_the_quicker_source, world_slow_link())
{
	uint32_t write = put(w, 1, 1, 500);

	DISK_REFUSE(w);
	REPLY(w, 0, 0);
	READ_FROM(w, remote, 0, VALUE);
	END_WELL(w, write); /* it has recovered */
	READ_FROM(w, backup, 0, VALUE);
}

QUICKER_TEST(a_failed_write_that_nobody_needs_does_not_turn_it_off, world_slow_link())
{
	uint32_t write = put(w, 1, 1, 500), zero;

	DISK_REFUSE(w);
	zero = trim(w, 1, 1);
	END_WELL(w, write, zero);
	READ_FROM(w, backup, 0, VALUE);
}

QUICKER_TEST(without_hedging_no_source_is_passed_by,
	     filled(WORLD_BUT(config.flags = ISW_ENGINE_QUICKER; config.hedge_us_min = 0)))
{
	expect(w, 1000, 50);
	READ_FROM(w, remote, 0, VALUE);
}

/* What takes half a second as expected is slow only for who waits, not a disk that hangs. */
QUICKER_TEST(a_slow_disk_that_answers_as_expected_is_not_avoided, world_quicker(0))
{
	uint32_t id, other;

	expect(w, 1000000, 300000);
	id = get(w, 0, 1);
	DISK_SLOW(w); /* after 250 ms, the longest that anybody waits alone */
	CHECK_EQ(sent(w, 0), 1);
	other = get(w, 1, 1);
	CHECK_EQ(sent(w, 0), 1);
	END_WELL(w, id, other);
}

/* This holds for each hedge_ms, however long a donor is waited for with it. */
TEST_CASES(a_disk_that_hangs_does_not_hold_up_an_unmap_for_long, 2, measured)
{
	struct world *w = world_slow_link();
	uint32_t id;

	w->e->config.hedge_us_min = 60000000;
	if (measured)
		expect(w, 50, 1000);
	w->e->backup->speed.measure_ns = measured ? 0 : 1ull << 60;
	id = get(w, 0, 1);
	CHECK_EQ(isw_slab_unmap(w->e, 0, slab_of(w, 0).remote, slab_of(w, 0).generation), 0);
	iswi_sim_of(w->e)->now_ns += 500000 * US;
	CHECK(iswi_backup_slow(w->e, iswi_sim_of(w->e)->now_ns));
	REPLY(w, 0, 0);
	GOT(w, id, VALUE);
	CHECK(slab_of(w, 0).state != ISW_SLAB_DRAINING);
	settle(w);
	all_ended(w);
	world_end(w);
}

/* ---- measuring */

QUICKER_TEST(the_slower_donor_is_measured, world_slow_link())
{
	w->e->remotes[0].speed.measure_ns = 0;
	READ_FROM(w, remote, 0, VALUE);
	CHECK(remote_of(w, 0).expected_ns < 1000 * US);
	READ_FROM(w, backup, 0, VALUE); /* there is a pause */
	iswi_sim_of(w->e)->now_ns += 60 * 1000 * US * ISWI_SPEED_MEASURE;
	for (uint32_t i = 0; i < 40; i++) {
		iswi_sim_of(w->e)->now_ns += 60 * US * ISWI_SPEED_MEASURE;
		CHECK_EQ(read_settled(w, 0), VALUE);
	}
	READ_FROM(w, remote, 0, VALUE); /* it has recovered */
}

/* Whatever its reads took of late, the backup has the page sooner. */
QUICKER_TEST(a_measurement_is_not_waited_for, world_slow_link())
{
	uint32_t id;

	w->e->remotes[0].read_tail_ns = 100000 * US;
	w->e->remotes[0].speed.measure_ns = 0;
	id = get(w, 0, 1);
	CHECK_EQ(iswi_sim_of(w->e)->donors[0]->pending[0].xfer->slow_us, 5000);
	SLOW(w, 0, 0);
	DISK_READ(w);
	GOT(w, id, VALUE);
}

/* On a link that is slower than the page-out, staging is full. */
QUICKER_TEST(a_measurement_is_not_waited_for_though_staging_is_full, world_slow_link())
{
	uint32_t id, writes[2];

	map(w, 1, 0);
	map(w, 2, 0);
	w->e->remotes[0].speed.measure_ns = 0;
	id = get(w, 0, 1);
	writes[0] = put(w, 8, 8, 1000);
	writes[1] = put(w, 16, 4, 1000); /* more than half of it */
	SLOW(w, 0, 0);
	DISK_READ(w);
	GOT(w, id, VALUE);
	END_WELL(w, writes[0], writes[1]);
}

/* A staged page in the middle makes two reads of one request, of which one measures. */
QUICKER_TEST(what_comes_with_a_measurement_is_not_waited_for_either, world_slow_link())
{
	uint32_t write = put(w, 1, 1, 500), id;

	remotes_settle(w);
	w->e->remotes[0].read_tail_ns = 100000 * US;
	w->e->remotes[0].speed.measure_ns = 0;
	id = get(w, 0, 3);
	CHECK_EQ(sent(w, 0), 2);
	for (uint32_t i = 0; i < 2; i++)
		CHECK_EQ(iswi_sim_of(w->e)->donors[0]->pending[i].xfer->slow_us, 5000);
	END_WELL(w, write, id);
}

QUICKER_TEST(the_slower_backup_is_measured, world_quicker(0))
{
	expect(w, 50, 1000);
	w->e->backup->speed.measure_ns = 0;
	READ_FROM(w, backup, 0, VALUE);
	CHECK_EQ(stats_of(w).fallback_measured, 1);
	CHECK(stats_of(w).backup_expected_ns < 1000 * US);
	READ_FROM(w, remote, 0, VALUE);
	sources_are(w, 1, 1, 0);
}

QUICKER_TEST(one_read_measures_until_it_has_ended, world_slow_link())
{
	uint32_t id, other;

	w->e->remotes[0].speed.measure_ns = 0;
	id = get(w, 0, 1);
	other = get(w, 1, 1);
	CHECK_EQ(sent(w, 0), 1);
	CHECK_EQ(w->e->remotes[0].speed.measure_ns, ISWI_SPEED_UNDER_WAY);
	REFUSE(w, 0, 0);
	CHECK(w->e->remotes[0].speed.measure_ns != ISWI_SPEED_UNDER_WAY);
	END_WELL(w, id, other);
	GOT(w, id, VALUE);
}

QUICKER_TEST(a_disk_that_refuses_to_be_measured_is_asked_again_later, world_quicker(0))
{
	uint32_t id;

	expect(w, 50, 1000);
	w->e->backup->speed.measure_ns = 0;
	id = get(w, 0, 1);
	DISK_TAKE_READ(w);
	DISK_FAIL(w, 0);
	CHECK(w->e->backup->speed.measure_ns != ISWI_SPEED_UNDER_WAY);
	CHECK_EQ(stats_of(w).backup_expected_ns, ISWI_SPEED_FAILED_NS);
	READ_ENDS(w, id, VALUE);
}

/* A page that need not be read from anywhere measures nothing. */
QUICKER_TEST(what_is_staged_measures_nothing, world_slow_link())
{
	uint32_t write;

	w->e->remotes[0].speed.measure_ns = 0;
	write = put(w, 0, 1, 500);
	GOT(w, get(w, 0, 1), 500);
	CHECK_EQ(w->e->remotes[0].speed.measure_ns, 0);
	END_WELL(w, write);
}

QUICKER_TEST(a_new_donor_is_not_judged_by_the_old_one, world_slow_link())
{
	unmap(w);
	CHECK_EQ(isw_remote_destroy(w->e, 0), 0);
	reap(w);
	CHECK_EQ(remote_new(w), 0);
	CHECK_EQ(remote_of(w, 0).expected_ns, 0);
	CHECK_EQ(w->e->remotes[0].speed.measure_ns, 0);
}

/* Nobody waits for the answer before it says that the donor is slow. */
QUICKER_TEST(a_read_that_is_not_answered_tells, world_quicker(0))
{
	uint32_t id;

	expect(w, 40, 50);
	id = get(w, 0, 1);
	iswi_sim_of(w->e)->now_ns += 10000 * US;
	SLOW(w, 0, 0);
	CHECK_EQ(remote_of(w, 0).expected_ns, 50 * US);
	READ_ENDS(w, id, VALUE);
}

/* ---- reading ahead */

static struct world *world_scan(void)
{
	struct world *w = world_quicker(ISW_ENGINE_READ_AHEAD);

	for (uint32_t slab = 1; slab < SLABS; slab++)
		map(w, slab, 0);
	for (uint32_t page = 4; page < PAGES; page += 4)
		write_settled(w, page, 4, VALUE + page);
	return w;
}

static void scan(struct world *w)
{
	for (uint64_t page = 0; page < PAGES / 2; page++)
		CHECK_EQ(read_settled(w, page), VALUE + page);
}

QUICKER_TEST(nothing_is_read_ahead_of_a_slow_link, world_scan())
{
	expect(w, 1000, 50);
	scan(w);
	CHECK_EQ(stats_of(w).pages_ahead, 0);
	sources_are(w, 0, PAGES / 2, 0);
}

/* A read ahead that is slow, not the quicker source, is why its pages come from the disk. */
QUICKER_TEST(what_a_slow_read_ahead_does_not_bring_counts_as_slow, world_scan())
{
	uint32_t id = 0;
	uint64_t page = 0;

	expect(w, 40, 50);
	for (; page < PAGES / 2; page++) {
		id = get(w, page, 1);
		if (sent(w, 0) > 1)
			break;
		settle(w);
	}
	CHECK(sent(w, 0) > 1);
	REPLY(w, 0, 0);
	GOT(w, id, VALUE + page);
	SLOW(w, 0, 0);
	expect(w, 1000, 50);
	id = get(w, page + 1, 1);
	DISK_READ(w);
	GOT(w, id, VALUE + page + 1);
	CHECK_EQ(stats_of(w).fallback_slow, 1);
	CHECK_EQ(stats_of(w).fallback_quicker, 0);
}

QUICKER_TEST(reading_ahead_measures_a_slow_link, world_scan())
{
	expect(w, 1000, 50);
	w->e->remotes[0].speed.took_ns[0] = US; /* single pages come soon, a group does not */
	w->e->remotes[0].speed.measure_ns = 0;
	scan(w);
	CHECK(stats_of(w).pages_ahead > 0);
	CHECK(iswi_speed_expected_ns(&w->e->remotes[0].speed, 4) < 1000 * US);
}

/* A request that has joined a read ahead which is slow goes to the disk, and that may hang. */
QUICKER_TEST(a_disk_that_hangs_does_not_hold_up_what_was_being_read_ahead, world_scan())
{
	uint32_t id = 0;
	uint64_t page = 0;

	for (; page < PAGES / 2; page++) {
		expect(w, 1000, 50);
		w->e->remotes[0].speed.took_ns[0] = US; /* single pages come soon */
		w->e->remotes[0].speed.measure_ns = 0;
		id = get(w, page, 1);
		if (sent(w, 0) > 1)
			break;
		settle(w);
	}
	CHECK_EQ(iswi_sim_of(w->e)->donors[0]->pending[1].xfer->slow_us, 5000);
	REPLY(w, 0, 0);
	GOT(w, id, VALUE + page);
	id = get(w, page + 1, 1);
	CHECK_EQ(sent(w, 0), 1); /* it has joined */
	SLOW(w, 0, 0);
	DISK_TAKE_READ(w);
	step(w, ISW_STEP_BACKUP_SLOW, 0, 0);
	remotes_settle(w);
	GOT(w, id, VALUE + page + 1);
}
