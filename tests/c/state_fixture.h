/* SPDX-License-Identifier: Apache-2.0 */
/* Worlds whose engine has a state file, and what becomes of them when their process dies. */
#ifndef ISW_TEST_STATE_FIXTURE_H
#define ISW_TEST_STATE_FIXTURE_H

#include <sys/mman.h>
#include <unistd.h>

#include "engine_fixture.h"
#include "sim_donor.h"

/* What a successor has in common with its predecessor. */
#define KEPT_FLAGS (ISW_ENGINE_NO_BACKUP | ISW_ENGINE_SEAL)

UNUSED_OK static struct world *world_kept(uint32_t flags, int state_fd)
{
	struct isw_engine_config config = world_config(flags);

	config.state_fd = state_fd;
	return world_of(&config);
}

static inline int new_file(void)
{
	int fd = memfd_create("state", MFD_CLOEXEC);

	CHECK(fd >= 0);
	return fd;
}

/* A file with the arena as it is now. */
static inline int copied_file(const struct world *w)
{
	int fd = new_file();

	CHECK_EQ(write(fd, w->e->arena, w->e->arena_bytes), w->e->arena_bytes);
	return fd;
}

static inline struct world *world_standby(uint32_t flags, int state_fd)
{
	return world_kept(flags | ISW_ENGINE_STANDBY, state_fd);
}

/*
 * Who would go on if the process died here: with a copy of everything, the other one goes on. What
 * was under way to the disk has not landed. There is one at a time.
 */
UNUSED_OK static struct world *successor(struct world *w)
{
	int fd = copied_file(w);
	struct isw_engine_config config =
		world_config((w->e->config.flags & KEPT_FLAGS) | ISW_ENGINE_STANDBY);
	struct isw_error error = {0};
	struct world *s;

	config.far_bytes = w->e->config.far_bytes;
	config.state_fd = fd;
	s = world_of(&config);
	close(fd);
	CHECK_OK(isw_sim_take_over(s->e, w->e, 0, &error), error);
	s->generations = w->generations;
	if (w->successor)
		world_end(w->successor);
	w->successor = s;
	reap(s);
	return s;
}

UNUSED_OK static void bring_back(struct world *w, uint32_t remote)
{
	CHECK_EQ(sim_donor_returns(w->e, remote), 0);
}

UNUSED_OK static uint32_t descriptors(const struct world *w)
{
	uint32_t n = 0;

	for (uint32_t i = 0; i < w->e->config.staging_pages; i++)
		n += iswi_kept64(&w->e->slots[i].page) != ISWI_NO_PAGE;
	return n;
}

#endif
