/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Deaths of the simulated process. In every build it may die between two handlers; in the one with
 * ISW_CRASH_POINTS behind any store to its arena, also while it takes over itself. Besides, that
 * build can look behind every store in turn without dying of it: a copy of the arena, the donors
 * and the disk is taken over, and every page must be what the model allows, before and after the
 * donors are back.
 */
#ifndef ISW_TEST_ENGINE_DEATHS_H
#define ISW_TEST_ENGINE_DEATHS_H

#if defined(ISW_CRASH_POINTS) && !defined(__SANITIZE_THREAD__)
#define IN_ANY_STORE   true
#define SEEDS_OF_LOOKS 52u /* even ones: in these it does not die of it */
#else /* ThreadSanitizer minds locks that the dead hold, and there is one thread anyway */
#define IN_ANY_STORE   false
#define SEEDS_OF_LOOKS UINT64_MAX
#endif
/* Of a run without arguments: looking behind every store takes as long as a hundred seeds. */
#define SEEDS             (SEEDS_OF_LOOKS < 1000u ? 2 * SEEDS_OF_LOOKS + 1 : 1000u)
#define DEATHS_EVERY      50u /* steps, about */
#define STORES_MAX        200u
#define LOOK_INSIDE_EVERY 256u

/* --------------------------------------------------------------------- succession */

static isw_engine *make_standby(const struct world *w, int state_fd)
{
	struct isw_engine_config config = w->config;
	struct isw_error error = {0};
	isw_engine *standby;

	config.state_fd = state_fd;
	config.flags |= ISW_ENGINE_STANDBY;
	if (isw_sim_create(&config, &standby, &error))
		fail(w, error.text, 0, 0);
	standby->pairs_free = pairs_of(w, standby);
	return standby;
}

/* All that the model knows of requests that nobody will answer any more. */
static void forget_requests(struct world *w)
{
	for (uint32_t i = 0; i < REQUESTS_MAX; i++)
		w->requests[i] = (struct request){0};
	w->open = 0;
	w->time++;
	for (uint32_t i = 0; i < PAGES; i++)
		for (uint32_t k = 0; k < w->pages[i].count; k++) {
			struct version *v = &w->pages[i].versions[k];

			v->maybe |= v->completed == NEVER;
			if (v->completed == NEVER)
				v->completed = w->time;
		}
}

/* Where the slabs are is what the successor's table says: a change may have been cut in two. */
static void learn_places(struct world *w)
{
	struct isw_event event;

	while (isw_engine_events(w->engine, &event, 1))
		if (event.kind != ISW_EVENT_SLAB_DRAINED)
			fail(w, "an unexpected event at take-over", event.kind, event.value);
	memset(w->where, 0, sizeof(w->where));
	memset(w->taken, 0, sizeof(w->taken));
	for (uint32_t slab = 0; slab < SLABS; slab++) {
		struct isw_slab_info info = slab_info(w, slab);

		if (info.state == ISW_SLAB_SUSPENDED) {
			w->where[slab][0] = (struct where){info.generation, info.slot, info.remote};
			w->taken[info.remote][info.slot] = true;
		}
		if (info.source_state == ISW_SLAB_SUSPENDED) {
			w->where[slab][1] = (struct where){info.source_generation, info.source_slot,
							   info.source_remote};
			w->taken[info.source_remote][info.source_slot] = true;
		}
		if ((info.state | info.source_state) & ~ISW_SLAB_SUSPENDED)
			fail(w, "a slab is neither suspended nor unmapped", slab, info.state);
	}
	for (uint32_t i = 0; i < DONORS; i++) {
		unsigned char record[ISW_RECORD_BYTES_MAX];

		if (isw_remote_record(w->engine, i, record) != sizeof(i) ||
		    memcmp(record, &i, sizeof(i)))
			fail(w, "a record is not what it was", i, 0);
	}
}

/* One page, from wherever it is; the error of the read. */
static int read_page(isw_engine *e, uint32_t page, void *data)
{
	struct isw_sim_request done;
	uint64_t id;

	isw_sim_submit(e, ISW_SIM_READ, page * ISW_PAGE_BYTES, ISW_PAGE_BYTES, NULL, &id);
	while (!isw_sim_reap(e, &done, data, ISW_PAGE_BYTES))
		if (!isw_engine_step(e, ISW_STEP_BACKUP_TAKE, 1, 0) &&
		    !isw_engine_step(e, ISW_STEP_BACKUP_DONE, 0, 0))
			for (uint32_t i = 0; i < DONORS; i++)
				isw_engine_step(e, ISW_STEP_REMOTE_REPLY, i, 0);
	return done.error;
}

static void bring_back(isw_engine *engine)
{
	for (uint32_t i = 0; i < DONORS; i++)
		sim_donor_returns(engine, i);
}

/* What each page is from now on is what the successor says first. */
static void observe(struct world *w)
{
	settle(w);
	for (uint32_t page = 0; page < PAGES; page++) {
		int error = read_page(w->engine, page, w->buffer);
		uint64_t value;

		if (error)
			fail(w, "a page is lost with its process", page, (uint64_t)-error);
		w->time++;
		memcpy(&value, w->buffer, sizeof(value));
		if (!may_read(&w->pages[page], value, w->time))
			fail(w, "a successor has other bytes", page, value);
		w->pages[page].versions[0] = (struct version){value, w->time, w->time, false};
		w->pages[page].count = 1;
	}
	w->time++;
}

/* The process is dead; somebody else goes on. He may die as well. */
static void succeed(struct world *w)
{
	struct isw_error error = {0};
	struct isw_engine_stats stats;
	uint64_t copied;

	w->deaths++;
	w->stores_left = 0;
	reap(w); /* what was answered */
	isw_engine_stats(w->engine, &stats);
	copied = stats.crc_errors_remote + stats.crc_errors_backup;
	if (!w->corrupted && copied)
		fail(w, "a checksum was needed before the death", copied, 0);
	forget_requests(w);
	for (;;) {
		isw_engine *volatile dead = w->engine;

		w->engine = make_standby(w, w->state_fd);
		if (!setjmp(w->life)) {
			w->stores_left = IN_ANY_STORE && below(w, 2) ? 1 + below(w, 40) : 0;
			if (isw_sim_take_over(w->engine, dead, draw(w), &error))
				fail(w, error.text, 0, 0);
			w->stores_left = 0;
			isw_sim_bury(dead);
			break;
		}
		isw_sim_bury(dead);
		w->deaths++;
	}
	for (uint32_t i = 0; i < DONORS; i++)
		w->down[i] = true;
	w->copies = 0;
	learn_places(w);
	if (w->lossless || below(w, 2)) {
		bring_back(w->engine);
		memset(w->down, 0, sizeof(w->down));
		take_events(w);
	}
	if (w->lossless || below(w, 2))
		observe(w);
}

/* ---------------------------------------------------------------- behind every store */

#ifdef ISW_CRASH_POINTS

/* Whose stores are looked behind, and by whom: 0 the world's, 1 a successor's. */
static struct {
	struct world *world;
	uint32_t depth, depth_max;
	isw_engine *engine;
	uint64_t stores;
} look;

/* Nonces count up under each salt, through every death; what is looked at is another world. */
static struct {
	struct {
		unsigned char salt[ISWI_SALT_BYTES];
		uint64_t nonce;
	} last[ISWI_EPOCHS];
	uint32_t salts;
} nonces;

void iswi_nonce_point(const unsigned char *salt, uint64_t nonce)
{
	uint32_t i = 0;

	if (!look.world || look.depth)
		return;
	while (i < nonces.salts && memcmp(nonces.last[i].salt, salt, ISWI_SALT_BYTES))
		i++;
	if (i == ISWI_EPOCHS)
		fail(look.world, "more salts than epochs", nonce, i);
	if (i < nonces.salts && nonce <= nonces.last[i].nonce)
		fail(look.world, "a nonce was used twice", nonce, i);
	memcpy(nonces.last[i].salt, salt, ISWI_SALT_BYTES);
	nonces.last[i].nonce = nonce;
	nonces.salts = ISWI_MAX(nonces.salts, i + 1);
}

static void look_behind(isw_engine *engine);

void iswi_crash_point(void)
{
	if (!look.world)
		return;
	if (look.world->stores_left && !--look.world->stores_left)
		longjmp(look.world->life, 1);
	if (look.engine && look.depth < look.depth_max)
		look_behind(look.engine);
}

static void nested_settle(const struct world *w, isw_engine *e)
{
	struct isw_engine_stats stats;

	for (uint32_t round = 0; round < 1000; round++) {
		for (uint32_t i = 0; i < DONORS; i++)
			while (isw_engine_step(e, ISW_STEP_REMOTE_REPLY, i, 0) > 0)
				;
		while (isw_engine_step(e, ISW_STEP_BACKUP_TAKE, 0, 0) ||
		       isw_engine_step(e, ISW_STEP_BACKUP_TAKE, 1, 0) ||
		       isw_engine_step(e, ISW_STEP_BACKUP_DONE, 0, 0))
			;
		isw_engine_stats(e, &stats);
		if (!stats.staging_pages_used && !stats.requests_in_flight)
			return;
	}
	fail(w, "staged pages that never end behind a store", look.stores,
	     stats.staging_pages_used);
}

/* Every page; an error is UINT64_MAX, where errors may be. */
static void nested_read(const struct world *w, isw_engine *e, bool errors, uint64_t *values)
{
	static _Alignas(8) unsigned char data[ISW_PAGE_BYTES];

	for (uint32_t page = 0; page < PAGES; page++) {
		int error = read_page(e, page, data);

		values[page] = UINT64_MAX;
		if (error && !errors)
			fail(w, "a page cannot be read behind a store", page, look.stores);
		if (error)
			continue;
		memcpy(&values[page], data, sizeof(values[page]));
		for (uint32_t i = 0; i < ISW_PAGE_BYTES; i += 8)
			if (memcmp(data + i, data, 8))
				fail(w, "a torn page behind a store", page, look.stores);
		if (!may_read(&w->pages[page], values[page], w->time + 1))
			fail(w, "wrong bytes behind a store", page, look.stores);
	}
}

static void check_successor(const struct world *w, isw_engine *e, uint64_t random)
{
	uint64_t first[PAGES], second[PAGES];
	struct isw_engine_stats stats;

	nested_read(w, e, w->lossless, first);
	for (uint32_t i = 0; i < DONORS; i++) /* what was sent lands, or not, until the fence */
		for (; random & 1; random >>= 1)
			isw_engine_step(e, ISW_STEP_REMOTE_LATE, i, (uint32_t)(random >> 8));
	bring_back(e);
	nested_settle(w, e);
	nested_read(w, e, false, second);
	for (uint32_t i = 0; i < PAGES; i++)
		if (first[i] != UINT64_MAX && first[i] != second[i])
			fail(w, "a page changes behind a store", i, look.stores);
	for (uint32_t i = 0; i < e->config.staging_pages; i++)
		if (iswi_kept64(&e->slots[i].page) != ISWI_NO_PAGE)
			fail(w, "a descriptor of nothing behind a store", i, look.stores);
	isw_engine_stats(e, &stats);
	if (!w->corrupted && stats.crc_errors_remote + stats.crc_errors_backup)
		fail(w, "a checksum was needed behind a store", look.stores, 0);
}

/* What would become of this engine's arena if its process died here? */
static void look_behind(isw_engine *engine)
{
	struct world *w = look.world;
	int fd = memfd_create("state", MFD_CLOEXEC);
	struct isw_error error = {0};
	isw_engine *standby, *outer = look.engine;
	uint64_t random = ++look.stores * 0x9e3779b97f4a7c15ull;

	if (write(fd, engine->arena, engine->arena_bytes) != (ssize_t)engine->arena_bytes)
		fail(w, "no memory for a copy", 0, 0);
	standby = make_standby(w, fd);
	look.depth++;
	look.engine = standby;
	if (look.stores % LOOK_INSIDE_EVERY)
		look.engine = NULL;
	if (isw_sim_take_over(standby, engine, random >> 16, &error))
		fail(w, error.text, look.stores, 0);
	look.engine = NULL;
	check_successor(w, standby, random >> 32);
	look.engine = outer;
	look.depth--;
	isw_engine_destroy(standby);
	close(fd);
	w->checks++;
}

static void look_at(struct world *w)
{
	look.world = w;
	memset(&nonces, 0, sizeof(nonces));
	look.engine = w && w->seed % SEEDS_OF_LOOKS == 0 ? w->engine : NULL;
	look.depth = 0;
	look.depth_max = 2;
}

#else

static void look_at(struct world *w)
{
	(void)w;
}

#endif

/* A life of so many steps, in one process after the other. */
static void live(struct world *w, void (*step)(struct world *w))
{
	look_at(w);
	for (w->step = 0; w->step < STEPS; w->step++) {
		if (setjmp(w->life)) {
			succeed(w);
			continue;
		}
		if (w->seed % 2 && !w->stores_left && !below(w, DEATHS_EVERY)) {
			if (IN_ANY_STORE && below(w, 4))
				w->stores_left = 1 + below(w, STORES_MAX);
			else
				succeed(w);
		}
		step(w);
	}
	w->stores_left = 0;
	look_at(NULL);
}

#endif
