/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Seeded simulation of the engine: random requests, and a random order of everything that a
 * network, donors, a disk and threads can do, with faults. A model that knows only what was asked
 * and answered checks every read. A failing seed is printed and replays exactly:
 *
 *     test_engine_sim [SEEDS [FIRST_SEED]]
 *
 * The process dies, too, and a successor goes on with what it left (engine_deaths.h).
 */
#include <errno.h>
#include <setjmp.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "engine/state/ahead.h"
#include "isw.h"
#include "seal_fixture.h"
#include "sim/sim.h"
#include "sim_donor.h"

#define SLAB_PAGES        8u
#define SLABS             5u
#define PAGES             (SLABS * SLAB_PAGES - 3u) /* the last slab is cut short */
#define DONORS            3u
#define SLOTS             SLABS
#define REQUEST_PAGES_MAX 12u
#define REQUESTS_MAX      24u
#define STEPS             400u
#define NEVER             UINT64_MAX
#define SEALS             32u

/* A version of a page: value 0 is zeros, others stand in every 8 bytes of the page. */
struct version {
	uint64_t value, submitted, completed;
	bool maybe; /* of a request that was never answered: its process died */
};

struct page {
	struct version versions[512];
	uint32_t count;
	/* Of a device that seals: of the versions of late, by which the disk's bytes are known. */
	struct iswi_seal seals[SEALS];
	uint32_t seals_count;
};

struct request {
	uint64_t id, submitted, first_value;
	uint32_t op, page, pages;
	bool open, disk_failed;
};

struct world {
	uint64_t seed, random, time, values;
	isw_engine *engine;
	struct page pages[PAGES];
	struct request requests[REQUESTS_MAX];
	uint32_t open;
	uint32_t remotes[DONORS];
	bool down[DONORS];
	/* Of each slab where it is, and where it comes from: generation 0 is nowhere. */
	struct where {
		uint64_t generation;
		uint32_t slot, donor;
	} where[SLABS][2];
	bool taken[DONORS][SLOTS];
	uint64_t generations;
	bool backup_reads_fail, copies_much, hedges, migrates, lossless;
	struct isw_engine_config config;
	int state_fd;
	uint32_t step, steps, stores_left; /* stores until the process dies; 0: it does not */
	jmp_buf life;
	uint64_t deaths, checks;
	_Alignas(8) unsigned char buffer[REQUEST_PAGES_MAX * ISW_PAGE_BYTES];
	uint64_t reads_checked, done, corrupted, copies, moved;
};

static uint64_t draw(struct world *w) /* xorshift64* */
{
	w->random ^= w->random >> 12;
	w->random ^= w->random << 25;
	w->random ^= w->random >> 27;
	return w->random * 2685821657736338717ull;
}

static uint32_t below(struct world *w, uint32_t limit)
{
	return (uint32_t)((draw(w) >> 33) % limit);
}

static void fail(const struct world *w, const char *what, uint64_t a, uint64_t b)
{
	fprintf(stderr, "seed %llu, time %llu: %s (%llu, %llu)\n", (unsigned long long)w->seed,
		(unsigned long long)w->time, what, (unsigned long long)a, (unsigned long long)b);
	exit(1);
}

/* ------------------------------------------------------------------------- model */

/* v may be read when no version written wholly after it was complete before the read began. */
static bool may_read(const struct page *page, uint64_t value, uint64_t read_submitted)
{
	for (uint32_t i = 0; i < page->count; i++) {
		const struct version *v = &page->versions[i];
		bool overwritten = false;

		if (v->value != value)
			continue;
		for (uint32_t k = 0; k < page->count && !overwritten; k++)
			overwritten = page->versions[k].submitted > v->completed &&
				      page->versions[k].completed < read_submitted &&
				      !page->versions[k].maybe;
		if (!overwritten)
			return true;
	}
	return false;
}

static void add_version(struct world *w, uint32_t page, uint64_t value)
{
	struct page *p = &w->pages[page];

	if (p->count == sizeof(p->versions) / sizeof(p->versions[0]))
		fail(w, "the model has no room", page, 0);
	p->versions[p->count++] = (struct version){value, w->time, NEVER, false};
}

static void complete_version(struct world *w, const struct request *r)
{
	for (uint32_t i = 0; i < r->pages; i++) {
		struct page *p = &w->pages[r->page + i];

		for (uint32_t k = 0; k < p->count; k++)
			if (p->versions[k].submitted == r->submitted)
				p->versions[k].completed = w->time;
	}
}

static void check_read(struct world *w, const struct request *r)
{
	for (uint32_t i = 0; i < r->pages; i++) {
		uint64_t *words = (uint64_t *)(w->buffer + i * ISW_PAGE_BYTES);

		for (uint32_t k = 1; k < ISW_PAGE_BYTES / 8; k++)
			if (words[k] != words[0])
				fail(w, "torn page", r->page + i, k);
		if (!may_read(&w->pages[r->page + i], words[0], r->submitted))
			fail(w, "wrong bytes", r->page + i, words[0]);
		w->reads_checked++;
	}
}

static void note_seals(struct world *w)
{
	for (uint32_t i = 0; iswi_sealed(w->engine) && i < PAGES; i++) {
		struct page *p = &w->pages[i];
		struct iswi_seal seal;

		iswi_seal_of(w->engine, i, &seal);
		/* All of it: a process may have died between its parts. */
		if (!p->seals_count ||
		    memcmp(&p->seals[(p->seals_count - 1) % SEALS], &seal, sizeof(seal)) != 0)
			p->seals[p->seals_count++ % SEALS] = seal;
	}
}

/* What the disk has of a page; UINT64_MAX: no version of late. */
static uint64_t value_on_disk(struct world *w, uint32_t page)
{
	static _Alignas(8) unsigned char opened[ISW_PAGE_BYTES];
	const unsigned char *disk = iswi_sim_of(w->engine)->disk + page * ISW_PAGE_BYTES;
	const struct page *p = &w->pages[page];
	uint64_t value;

	memcpy(opened, disk, sizeof(opened));
	for (uint32_t k = p->seals_count; iswi_sealed(w->engine); k--) {
		if (!k || k + SEALS == p->seals_count)
			return UINT64_MAX;
		if (iswi_seal_open(w->engine, page, &p->seals[(k - 1) % SEALS], disk, opened))
			break;
	}
	memcpy(&value, opened, sizeof(value));
	return value;
}

/* What was complete before a flush began is on the disk when it ends, or newer data is. */
static void check_flush(struct world *w, const struct request *r)
{
	for (uint32_t i = 0; i < PAGES; i++) {
		const struct page *p = &w->pages[i];
		bool zeroed = false;
		uint64_t value;

		/* Zeros are no bytes on the disk but a missing bit; left to the page tables. */
		for (uint32_t k = 1; k < p->count; k++)
			zeroed |= !p->versions[k].value;
		value = value_on_disk(w, i);
		if (!zeroed && !may_read(p, 0, r->submitted) && !may_read(p, value, r->submitted))
			fail(w, "a flush ended before its data was on the disk", i, value);
	}
}

static void reap(struct world *w)
{
	struct isw_sim_request done;

	note_seals(w);
	while (isw_sim_reap(w->engine, &done, w->buffer, sizeof(w->buffer))) {
		struct request *r = NULL;

		w->time++;
		for (uint32_t i = 0; i < REQUESTS_MAX; i++)
			if (w->requests[i].open && w->requests[i].id == done.id)
				r = &w->requests[i];
		if (!r)
			fail(w, "a request was answered twice", done.id, 0);
		r->open = false;
		w->open--;
		w->done++;
		switch (r->op & 0xff) {
		case ISW_SIM_READ:
			if (!done.error)
				check_read(w, r);
			else if (!r->disk_failed)
				fail(w, "a read failed while a copy existed", r->page,
				     (uint64_t)-done.error);
			break;
		case ISW_SIM_FLUSH:
			if (!done.error && !w->lossless)
				check_flush(w, r);
			break;
		default:
			if (done.error && w->lossless)
				fail(w, "a write failed", r->page, (uint64_t)-done.error);
			/* A write that failed may show at any later time: it never completes. */
			if (!done.error)
				complete_version(w, r);
			if (!done.error && r->op & ISW_SIM_FUA && !w->lossless)
				check_flush(w, r);
		}
	}
}

/* ---------------------------------------------------------------------- requests */

static struct request *free_request(struct world *w)
{
	for (uint32_t i = 0; i < REQUESTS_MAX; i++)
		if (!w->requests[i].open)
			return &w->requests[i];
	return NULL;
}

static void submit(struct world *w, uint32_t op, uint32_t page, uint32_t pages)
{
	struct request *r = free_request(w);
	int code;

	if (!r)
		return;
	w->time++;
	*r = (struct request){.submitted = w->time, .op = op, .page = page, .pages = pages};
	for (uint32_t i = 0; i < pages; i++) {
		uint64_t *words = (uint64_t *)(w->buffer + i * ISW_PAGE_BYTES);
		bool write = op == ISW_SIM_WRITE || op == (ISW_SIM_WRITE | ISW_SIM_FUA);

		if (write || op == ISW_SIM_TRIM || op == ISW_SIM_ZERO)
			add_version(w, page + i, write ? ++w->values : 0);
		for (uint32_t k = 0; write && k < ISW_PAGE_BYTES / 8; k++)
			words[k] = w->values;
	}
	r->open = true;
	w->open++;
	/* Half of the seeds have a front end that holds transfers back. */
	if (w->seed % 2 && below(w, 2))
		op |= ISW_SIM_PLUG;
	code = isw_sim_submit(w->engine, op, (uint64_t)page * ISW_PAGE_BYTES,
			      (uint64_t)pages * ISW_PAGE_BYTES, w->buffer, &r->id);
	if (code)
		fail(w, "submit failed", (uint64_t)-code, 0);
	reap(w);
}

static void random_request(struct world *w)
{
	uint32_t page = below(w, PAGES), kind = below(w, 20);
	uint32_t pages = 1 + below(w, below(w, 3) ? 2 : REQUEST_PAGES_MAX);

	if (page + pages > PAGES)
		pages = PAGES - page;
	if (kind < 8)
		submit(w, ISW_SIM_READ, page, pages);
	else if (kind < 16)
		submit(w, ISW_SIM_WRITE, page, pages);
	else if (kind < 17)
		submit(w, ISW_SIM_WRITE | ISW_SIM_FUA, page, pages);
	else if (kind < 19)
		submit(w, kind == 17 ? ISW_SIM_TRIM : ISW_SIM_ZERO, page, pages);
	else
		submit(w, ISW_SIM_FLUSH, 0, 0);
}

/* ----------------------------------------------------- what Python's side would do */

static struct isw_slab_info slab_info(struct world *w, uint32_t slab)
{
	struct isw_slab_info info;

	if (isw_engine_slabs(w->engine, slab, 1, &info) != 1)
		fail(w, "no such slab", slab, 0);
	return info;
}

static struct where *find(struct world *w, uint32_t slab, uint64_t generation)
{
	for (uint32_t i = 0; i < 2; i++)
		if (w->where[slab][i].generation == generation)
			return &w->where[slab][i];
	fail(w, "a slab is where nobody put it", slab, generation);
	return NULL;
}

/* To a donor, or to one more. */
static void map_slab(struct world *w, uint32_t slab)
{
	uint32_t donor = below(w, DONORS), slot = below(w, SLOTS);
	struct isw_slab_info info = slab_info(w, slab);
	bool unmapped = info.state == ISW_SLAB_UNMAPPED;
	uint64_t generation = ++w->generations;
	int code;

	if (w->down[donor] || w->taken[donor][slot] || info.state == ISW_SLAB_DRAINING ||
	    (!unmapped && (!w->migrates || info.source_state != ISW_SLAB_UNMAPPED)))
		return;
	isw_engine_step(w->engine, ISW_STEP_REMOTE_WIPE, w->remotes[donor], slot);
	code = unmapped ? isw_slab_map(w->engine, slab, w->remotes[donor], slot, generation)
			: isw_slab_migrate(w->engine, slab, w->remotes[donor], slot, generation);
	if (code)
		fail(w, "map failed", slab, donor);
	w->taken[donor][slot] = true;
	*find(w, slab, 0) = (struct where){generation, slot, donor};
}

/* The source of a migration: done with it, sometimes before everything is copied. */
static void leave_source(struct world *w, uint32_t slab)
{
	struct isw_slab_info info = slab_info(w, slab);
	uint32_t pages = 0;
	int code;

	if (info.source_state != ISW_SLAB_MAPPED && info.source_state != ISW_SLAB_SUSPENDED)
		return;
	code = isw_slab_pages_at(w->engine, slab, info.source_remote, info.source_generation,
				 &pages);
	if (code < 0 || pages > SLAB_PAGES)
		fail(w, "the source is not known", slab, info.source_generation);
	if (code == 0 && pages == 0)
		w->moved++;
	else if (w->lossless || below(w, 4))
		return;
	if (isw_slab_unmap(w->engine, slab, info.source_remote, info.source_generation))
		fail(w, "the source cannot be left", slab, info.source_generation);
}

static void pull_slab(struct world *w, uint32_t slab)
{
	struct isw_slab_info info = slab_info(w, slab);
	int code = isw_slab_pull(w->engine, slab, info.generation, below(w, 2));
	bool both = info.state == ISW_SLAB_MAPPED && info.source_state == ISW_SLAB_MAPPED;

	if (both ? code < 0 : code != -ESTALE)
		fail(w, "a pull went wrong", slab, (uint64_t)-code);
}

/* What the donor lacks of a part of it. */
static void fill_slab(struct world *w, uint32_t slab)
{
	struct isw_slab_info info = slab_info(w, slab);
	uint32_t first = below(w, SLAB_PAGES), pages_max = 1 + below(w, SLAB_PAGES), next = 0;
	int begun = isw_slab_fill(w->engine, slab, info.generation, first, pages_max, &next);

	if (info.state != ISW_SLAB_MAPPED) {
		if (begun != -ESTALE)
			fail(w, "a slab without a donor was filled", slab, info.state);
		return;
	}
	if (begun < 0 || begun > (int)pages_max || next < first + (uint32_t)begun ||
	    next > SLAB_PAGES)
		fail(w, "a fill went wrong", (uint64_t)begun, next);
	w->copies += (uint64_t)begun;
}

static void take_events(struct world *w)
{
	struct isw_event event;

	while (isw_engine_events(w->engine, &event, 1)) {
		if (event.kind == ISW_EVENT_REMOTE_DOWN)
			w->down[event.remote] = true; /* remotes are numbered from 0 in order */
		if (event.kind == ISW_EVENT_SLAB_DRAINED) {
			/* DONE: the donor gives the slot's memory to somebody else. */
			struct where *where = find(w, event.slab, event.generation);

			for (uint32_t i = 0; i < 2; i++) {
				struct iswi_place *place = iswi_place(w->engine, event.slab, i);

				if (place->generation == event.generation &&
				    atomic_load(&place->in_flight))
					fail(w, "DONE with requests in flight", event.slab, 0);
			}
			if (event.remote != w->remotes[where->donor])
				fail(w, "DONE to another donor", event.slab, event.remote);
			isw_engine_step(w->engine, ISW_STEP_REMOTE_WIPE, event.remote, where->slot);
			w->taken[where->donor][where->slot] = false;
			*where = (struct where){0};
		}
	}
}

static void control(struct world *w)
{
	uint32_t slab = below(w, SLABS), donor = below(w, DONORS);
	struct isw_slab_info info = slab_info(w, slab);

	switch (below(w, w->migrates ? 10 : 7)) {
	case 0:
	case 1:
	case 7:
		map_slab(w, slab);
		break;
	case 8:
		pull_slab(w, slab);
		break;
	case 9:
		leave_source(w, slab);
		break;
	case 2:
	case 3:
		fill_slab(w, slab);
		break;
	case 4:
		if ((info.state == ISW_SLAB_MAPPED && below(w, 4) == 0) ||
		    info.state == ISW_SLAB_SUSPENDED)
			isw_slab_unmap(w->engine, slab, info.remote, info.generation);
		break;
	default:
		if (!w->down[donor])
			break;
		w->down[donor] = sim_donor_returns(w->engine, w->remotes[donor]) != 0;
	}
	take_events(w);
}

/* ------------------------------------------------------------------------- steps */

static void random_step(struct world *w, bool faults)
{
	static const uint32_t good[] = {
		ISW_STEP_REMOTE_APPLY, ISW_STEP_REMOTE_REPLY, ISW_STEP_REMOTE_REPLY,
		ISW_STEP_BACKUP_TAKE,  ISW_STEP_BACKUP_DONE,  ISW_STEP_BACKUP_RETRY,
		ISW_STEP_UNPLUG,       ISW_STEP_REMOTE_SLOW,  ISW_STEP_BACKUP_SLOW};
	static const uint32_t bad[] = {ISW_STEP_REMOTE_FAIL,    ISW_STEP_REMOTE_TEAR,
				       ISW_STEP_REMOTE_CORRUPT, ISW_STEP_REMOTE_DOWN,
				       ISW_STEP_REMOTE_LATE,    ISW_STEP_REMOTE_LATE,
				       ISW_STEP_BACKUP_FAIL};
	bool inject = faults && below(w, 8) == 0;
	uint32_t step = inject ? bad[below(w, 7)] : good[below(w, w->hedges ? 9 : 7)];
	uint32_t r = below(w, DONORS), n = (uint32_t)(draw(w) >> 40);
	uint64_t passed_ns;

	if (step == ISW_STEP_BACKUP_TAKE)
		r = below(w, 2);
	if (step == ISW_STEP_REMOTE_CORRUPT) {
		if (w->seed % 3)
			return;
		w->corrupted++;
	}
	w->time++;
	/* What the sources are judged by. */
	passed_ns = draw(w);
	iswi_sim_of(w->engine)->now_ns += passed_ns >> (40 + below(w, 24));
	if (step == ISW_STEP_BACKUP_FAIL) /* whose it is the test cannot tell */
		for (uint32_t i = 0; i < REQUESTS_MAX; i++)
			w->requests[i].disk_failed = true;
	isw_engine_step(w->engine, step, r, n);
	take_events(w);
	reap(w);
}

/* All of them, two or none, so that reads are hedged in both ways. */
static uint32_t pairs_of(const struct world *w, const isw_engine *e)
{
	static const uint32_t pairs[] = {ISWI_PAIRS_ALL, 3, 0};

	return iswi_hedges(e) ? pairs[w->seed % ISWI_ARRAY_LEN(pairs)] : 0;
}

/* No read is under way. */
static void check_speed(const struct world *w, const struct iswi_speed *speed)
{
	if (speed->pages || speed->measure_ns == ISWI_SPEED_UNDER_WAY)
		fail(w, "a read that never ends", speed->pages, speed->measure_ns);
}

static void check_backup(const struct world *w)
{
	const struct isw_engine *e = w->engine;
	uint32_t bare = iswi_hedges(e) ? ISWI_BARE : 0;

	check_speed(w, &e->backup->speed);
	if (e->backup->slow_head || e->backup->slow_count || e->pairs_free != pairs_of(w, e) ||
	    e->bare_free != bare)
		fail(w, "a read of both that never ends", e->backup->slow_count, e->pairs_free);
}

/* Without more faults everything must come to an end. */
static void settle(struct world *w)
{
	struct isw_engine_stats stats;
	uint64_t ended;

	for (uint32_t round = 0;; round++) {
		isw_engine_step(w->engine, ISW_STEP_UNPLUG, 0, 0);
		for (uint32_t donor = 0; donor < DONORS; donor++)
			while (isw_engine_step(w->engine, ISW_STEP_REMOTE_REPLY, w->remotes[donor],
					       0) > 0)
				reap(w);
		isw_engine_step(w->engine, ISW_STEP_BACKUP_RETRY, 0, 0);
		while (isw_engine_step(w->engine, ISW_STEP_BACKUP_TAKE, 0, 0) ||
		       isw_engine_step(w->engine, ISW_STEP_BACKUP_TAKE, 1, 0) ||
		       isw_engine_step(w->engine, ISW_STEP_BACKUP_DONE, 0, 0))
			reap(w);
		take_events(w);
		reap(w);
		isw_engine_stats(w->engine, &stats);
		if (!w->open && !stats.staging_pages_used)
			break;
		if (round == 1000)
			fail(w, "requests or staged pages that never end", w->open,
			     stats.staging_pages_used);
	}
	ended = stats.pages_copied + stats.pages_migrated + stats.pages_copy_dropped;
	if (ended != iswi_counted(&w->engine->count.copies_begun) || ended < w->copies)
		fail(w, "copies without an end", w->copies, ended);
	for (uint32_t i = 0; i < DONORS; i++) {
		if (atomic_load(&w->engine->remotes[i].owed))
			fail(w, "a donor owes hedged reads for good", i, 0);
		check_speed(w, &w->engine->remotes[i].speed);
	}
	check_backup(w);
	if (stats.pages_in != stats.pages_in_remote + stats.pages_in_backup +
				      stats.pages_in_staging + stats.pages_in_zero &&
	    !stats.requests_failed)
		fail(w, "a page was counted twice or not at all", stats.pages_in, 0);
	if (stats.requests_in_flight || stats.backup_failing)
		fail(w, "something is left in flight", stats.requests_in_flight,
		     stats.backup_failing);
}

/* The backup has everything and the donors have nothing: there is much to copy. */
static void change_donors(struct world *w)
{
	settle(w);
	for (uint32_t slab = 0; slab < SLABS; slab++) {
		struct isw_slab_info info = slab_info(w, slab);

		if (info.state == ISW_SLAB_MAPPED || info.state == ISW_SLAB_SUSPENDED)
			isw_slab_unmap(w->engine, slab, info.remote, info.generation);
	}
	take_events(w);
	for (uint32_t slab = 0; slab < SLABS; slab++) {
		map_slab(w, slab);
		fill_slab(w, slab);
	}
}

/* Each page that may be had from what was read ahead is remote-valid, and at rest it is right. */
static void check_ahead(struct world *w)
{
	struct isw_engine *e = w->engine;

	for (uint32_t i = 0; e->ahead && i < ISWI_AHEAD_GROUPS; i++) {
		const struct iswi_ahead_group *g = &e->ahead->groups[i];

		for (uint64_t page = g->group * ISWI_GROUP_PAGES, bits = g->pages; bits;
		     page++, bits >>= 1) {
			if (!(bits & 1))
				continue;
			if (!iswi_bit(e->remote_valid, page))
				fail(w, "read ahead and not remote-valid", page, i);
			if (!g->reading && !is_newest(e, page, iswi_ahead_data(g, page)))
				fail(w, "outdated, and still read ahead", page, i);
		}
	}
}

/* Reads with a trend, with anything in between. */
static void scan(struct world *w)
{
	bool back = below(w, 2);
	uint32_t at = 0;

	if (below(w, 2))
		settle(w);
	while (at < PAGES) {
		uint32_t pages = 1 + below(w, 3);

		pages = at + pages > PAGES ? PAGES - at : pages;
		submit(w, ISW_SIM_READ, back ? PAGES - at - pages : at, pages);
		for (uint32_t i = below(w, 6); i; i--)
			random_step(w, false);
		if (below(w, 8) == 0)
			random_request(w);
		check_ahead(w);
		at += pages;
	}
}

/* Donors and backup have everything, and reads are under way: there is much to hedge. */
static void read_much(struct world *w)
{
	settle(w);
	for (uint32_t slab = 0; slab < SLABS; slab++) {
		map_slab(w, slab);
		fill_slab(w, slab);
	}
	settle(w);
	for (uint32_t i = 0; i < REQUESTS_MAX / 2; i++) {
		uint32_t page = below(w, PAGES), pages = 1 + below(w, 4);

		submit(w, ISW_SIM_READ, page, page + pages > PAGES ? PAGES - page : pages);
		isw_engine_step(w->engine, ISW_STEP_UNPLUG, 0, 0);
		if (below(w, 2))
			isw_engine_step(w->engine, ISW_STEP_REMOTE_SLOW, below(w, DONORS),
					below(w, REQUESTS_MAX));
	}
}

/* A slab after the other moves as a whole, while it is used. */
static void migrate_all(struct world *w)
{
	for (uint32_t slab = 0; slab < SLABS; slab++) {
		map_slab(w, slab);
		map_slab(w, slab);
		pull_slab(w, slab);
		for (uint32_t i = 0; i < 16; i++) {
			if (below(w, 3) == 0)
				random_request(w);
			random_step(w, false);
		}
		if (below(w, 2))
			settle(w);
		leave_source(w, slab);
	}
	take_events(w);
}

static void read_all(struct world *w)
{
	for (uint32_t page = 0; page < PAGES; page += REQUEST_PAGES_MAX) {
		uint32_t rest = PAGES - page;

		submit(w, ISW_SIM_READ, page, rest < REQUEST_PAGES_MAX ? rest : REQUEST_PAGES_MAX);
	}
	settle(w);
}

/* What all seeds did together. */
struct totals {
	uint64_t copied, migrated, moved, moved_lossless, dropped, hedged, hedges_won, passed_by,
		deaths, checks, ahead, ahead_used, quicker, measured;
};

#include "engine_deaths.h"

/* A world that knows only what is to happen in it. */
static void start(struct world *w, uint64_t seed, uint32_t staging)
{
	struct isw_error error = {0};

	w->seed = seed;
	w->random = seed * 0x9e3779b97f4a7c15ull + 1;
	w->state_fd = memfd_create("state", MFD_CLOEXEC);
	w->config = (struct isw_engine_config){
		.size_bytes = PAGES * ISW_PAGE_BYTES,
		.slab_bytes = SLAB_PAGES * ISW_PAGE_BYTES,
		.staging_pages = staging,
		.request_bytes_max = REQUEST_PAGES_MAX * ISW_PAGE_BYTES,
		.requests_max = REQUESTS_MAX,
		.remotes_max = DONORS,
		.state_fd = w->state_fd,
		.backup_write_bytes_max = 4 * ISW_PAGE_BYTES,
		.hedge_us_min = w->hedges,
		.flags = (w->lossless ? ISW_ENGINE_NO_BACKUP : 0) |
			 (w->seed / 2 % 2 ? ISW_ENGINE_READ_AHEAD : 0) |
			 (w->seed / 4 % 2 ? ISW_ENGINE_QUICKER : 0) |
			 (w->seed / 8 % 2 ? test_seal_flag() : 0),
		.seal_key_fd = test_key_fd(),
	};
	if (isw_sim_create(&w->config, &w->engine, &error))
		fail(w, error.text, 0, 0);
	w->engine->pairs_free = pairs_of(w, w->engine);
	/* A world is too short for a trial. */
	w->engine->pace.way = w->engine->pace.kept = w->seed / 16 % 2;
	w->engine->pace.left = UINT32_MAX;
	for (uint32_t i = 0; i < PAGES; i++) {
		add_version(w, i, 0);
		w->pages[i].versions[0].completed = 0;
	}
	for (uint32_t i = 0; i < DONORS; i++)
		if (isw_sim_remote(w->engine, 1 + below(w, 3), SLOTS, &w->remotes[i]) ||
		    w->remotes[i] != i || isw_remote_record_set(w->engine, i, &i, sizeof(i)))
			fail(w, "no remote", i, 0);
}

static void end(struct world *w, struct totals *totals)
{
	struct isw_engine_stats stats;

	isw_engine_stats(w->engine, &stats);
	totals->copied += stats.pages_copied;
	totals->migrated += stats.pages_migrated;
	totals->dropped += stats.pages_copy_dropped;
	totals->hedged += stats.hedged_reads;
	totals->hedges_won += stats.hedged_wins;
	totals->passed_by += stats.fallback_slow;
	totals->quicker += stats.fallback_quicker;
	totals->measured += stats.fallback_measured;
	totals->ahead += stats.pages_ahead;
	totals->ahead_used += stats.pages_ahead_used;
	totals->deaths += w->deaths;
	totals->checks += w->checks;
	look_at(NULL);
	isw_engine_destroy(w->engine);
	close(w->state_fd);
}

/* Of a copy: nobody has asked for it, and what it was to bring is where it was. */
static void fail_a_copy(struct world *w)
{
	uint32_t r = below(w, DONORS), kind = below(w, 2);
	const struct iswi_sim_donor *donor = iswi_sim_of(w->engine)->donors[r];

	for (uint32_t n = 0; n < donor->pending_count; n++) {
		const struct iswi_xfer *xfer = donor->pending[n].xfer;

		if (!ISWI_CONTAINER(xfer, struct iswi_op, xfer)->copy)
			continue;
		if (kind && xfer->kind == ISWI_XFER_READ)
			w->corrupted++;
		isw_engine_step(w->engine, kind ? ISW_STEP_REMOTE_CORRUPT : ISW_STEP_REMOTE_FAIL, r,
				n);
		break;
	}
	take_events(w);
	reap(w);
}

static void lossless_step(struct world *w)
{
	uint32_t what = below(w, 10), slab = below(w, SLABS);

	if (what < 3)
		random_request(w);
	else if (what == 3)
		map_slab(w, slab);
	else if (what == 4)
		pull_slab(w, slab);
	else if (what == 5)
		leave_source(w, slab);
	else if (what == 6)
		fail_a_copy(w);
	else
		random_step(w, false);
	take_events(w);
	check_ahead(w);
	if (w->step % (STEPS / 4) == STEPS / 8)
		migrate_all(w);
	if (w->engine->ahead && w->step % (STEPS / 4) == STEPS / 16)
		scan(w);
}

/*
 * Without a backup, and without a fault but to copies: slabs migrate in any order of events, and
 * each source is left as soon as it is said to have nothing. Not a page may be lost, nor a request
 * fail - not even when the process dies.
 */
static void run_lossless(uint64_t seed, struct totals *totals)
{
	static struct world world;
	struct world *w = &world;
	struct isw_engine_stats stats;

	world = (struct world){.lossless = true, .migrates = true};
	start(w, seed, seed % 3 ? 64 : 16);
	for (uint32_t slab = 0; slab < SLABS; slab++)
		while (slab_info(w, slab).state == ISW_SLAB_UNMAPPED)
			map_slab(w, slab);
	live(w, lossless_step);
	settle(w);
	read_all(w);
	isw_engine_stats(w->engine, &stats);
	if (stats.requests_failed || (stats.crc_errors_remote && !w->corrupted))
		fail(w, "something failed", stats.requests_failed, stats.crc_errors_remote);
	end(w, totals);
	totals->moved_lossless += w->moved;
}

static void step(struct world *w)
{
	uint32_t what = below(w, 10), i = w->step;

	if (w->copies_much && i && i % (STEPS / 4) == 0)
		change_donors(w);
	if (w->hedges && i % (STEPS / 8) == STEPS / 16)
		read_much(w);
	if (w->migrates && i % (STEPS / 8) == STEPS / 32)
		migrate_all(w);
	if (w->engine->ahead && i % (STEPS / 8) == STEPS / 64)
		scan(w);
	if (what < 3)
		random_request(w);
	else if (what < 4)
		control(w);
	else
		random_step(w, w->seed % 4 != 0);
	check_ahead(w);
}

static void run(uint64_t seed, struct totals *totals)
{
	static struct world world;
	struct world *w = &world;
	struct isw_engine_stats stats;

	world = (struct world){
		.copies_much = seed % 5 > 2,
		.hedges = seed % 7 > 2,
		.migrates = seed % 11 > 3,
	};
	/* They leave half of the buffers free. */
	start(w, seed, w->copies_much || w->hedges || w->migrates ? 64 : 16);
	live(w, step);
	settle(w);
	read_all(w);
	/* Every donor dies at once: with a backup nothing may be lost. */
	for (uint32_t i = 0; i < DONORS; i++)
		isw_engine_step(w->engine, ISW_STEP_REMOTE_DOWN, w->remotes[i], 0);
	settle(w);
	read_all(w);
	/*
	 * Checksums would cover up for a broken rule: where no donor lied, none may have been
	 * needed.
	 */
	isw_engine_stats(w->engine, &stats);
	if (!w->corrupted && stats.crc_errors_remote + stats.crc_errors_backup)
		fail(w, "stale or foreign bytes were caught by their checksum only",
		     stats.crc_errors_remote, stats.crc_errors_backup);
	if (w->reads_checked < PAGES)
		fail(w, "too little was checked", w->reads_checked, 0);
	end(w, totals);
	totals->moved += w->moved;
}

int main(int argc, char **argv)
{
	uint64_t seeds = argc > 1 ? strtoull(argv[1], NULL, 10) : SEEDS;
	uint64_t first = argc > 2 ? strtoull(argv[2], NULL, 10) : 1;
	struct totals totals = {0};

	for (uint64_t seed = first; seed < first + seeds; seed++) {
		run(seed, &totals);
		if (seed % 4 == 0)
			run_lossless(seed, &totals);
	}
	printf("%llu seeds from %llu; %llu pages copied, %llu migrated, %llu copies dropped, %llu "
	       "slabs moved, %llu without a backup; %llu reads hedged, %llu by the second leg, "
	       "%llu "
	       "pages from there; %llu pages from the backup as the quicker source, %llu to "
	       "measure "
	       "it; %llu pages read ahead, %llu of them used; %llu deaths, %llu stores looked "
	       "behind\n",
	       (unsigned long long)seeds, (unsigned long long)first,
	       (unsigned long long)totals.copied, (unsigned long long)totals.migrated,
	       (unsigned long long)totals.dropped, (unsigned long long)totals.moved,
	       (unsigned long long)totals.moved_lossless, (unsigned long long)totals.hedged,
	       (unsigned long long)totals.hedges_won, (unsigned long long)totals.passed_by,
	       (unsigned long long)totals.quicker, (unsigned long long)totals.measured,
	       (unsigned long long)totals.ahead, (unsigned long long)totals.ahead_used,
	       (unsigned long long)totals.deaths, (unsigned long long)totals.checks);
	return 0;
}
