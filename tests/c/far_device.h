/* SPDX-License-Identifier: Apache-2.0 */
/* A donor, and an engine with a range for far memory: for tests of the front end far. */
#ifndef ISW_TEST_FAR_DEVICE_H
#define ISW_TEST_FAR_DEVICE_H

#include <sys/mman.h>
#include <sys/socket.h>

#include "engine_real.h"
#include "far/ring.h"

#define MIB         (1ull << 20)
#define BLOCK_BYTES (4 * MIB) /* of the block device; the far range begins at the next slab */
#define SLAB_BYTES  (32 * MIB)
#define SLABS_MAX   64u

struct far_donor {
	isw_store *store;
	uint64_t lease;
	uint32_t slabs;
	uint16_t port;
	char ticket[ISW_TICKET_TEXT_BYTES];
	uint32_t slots[SLABS_MAX];
	uint64_t generations[SLABS_MAX];
};

static inline void make_far_donor(struct far_donor *donor, uint64_t far_bytes)
{
	donor->slabs = 1 + (uint32_t)((far_bytes + SLAB_BYTES - 1) / SLAB_BYTES);
	CHECK(donor->slabs <= SLABS_MAX);
	donor->store =
		donor_store("127.0.0.1", SLAB_BYTES, donor->slabs, donor->slabs, &donor->port);
	CHECK_EQ(lease_create(donor->store, donor->slabs, donor->ticket, &donor->lease, NULL), 0);
	for (uint32_t i = 0; i < donor->slabs; i++)
		CHECK_EQ(isw_store_map(donor->store, donor->lease, i, &donor->slots[i],
				       &donor->generations[i]),
			 0);
}

/* state_fd, key_fd: -1 for none. */
static inline struct isw_engine_config far_engine_config(uint64_t far_bytes, int state_fd,
							 int key_fd)
{
	return (struct isw_engine_config){
		.size_bytes = SLAB_BYTES + far_bytes,
		.far_bytes = SLAB_BYTES - BLOCK_BYTES + far_bytes,
		.slab_bytes = SLAB_BYTES,
		.staging_pages = 4096,
		.request_bytes_max = 1 << 20,
		.requests_max = 16,
		.remotes_max = 2,
		.backup_write_bytes_max = 1 << 20,
		.backup_writers = 1,
		.backup_readers = 1,
		.flags = ISW_ENGINE_NO_BACKUP | (key_fd < 0 ? 0 : ISW_ENGINE_SEAL),
		.state_fd = state_fd,
		.seal_key_fd = key_fd,
	};
}

/* Maps every slab at the donor, or resumes them there, by a successor. */
static inline void use_far_donor(isw_engine *e, const struct far_donor *donor, bool again)
{
	struct isw_remote_config remote =
		donor_config("127.0.0.1", donor->port, donor->ticket, 4, donor->slabs * SLAB_BYTES);
	struct isw_error error = {0};
	uint32_t number = 0;

	if (again)
		CHECK_OK(isw_remote_reconnect(e, 0, &remote, &error), error);
	else
		CHECK_OK(isw_remote_connect(e, &remote, &number, &error), error);
	for (uint32_t i = 0; i < donor->slabs; i++)
		CHECK_EQ(again ? isw_slab_resume(e, i, 0, donor->generations[i])
			       : isw_slab_map(e, i, 0, donor->slots[i], donor->generations[i]),
			 0);
}

static inline isw_frontend *start_far(isw_engine *e, int table_fd, int job_end)
{
	struct isw_frontend_config config = {.table_fd = table_fd};
	struct isw_error error = {0};
	isw_frontend *frontend;

	CHECK_OK(isw_frontend_start(e, "far", &config, &frontend, &error), error);
	CHECK_OK(isw_frontend_serve(frontend, job_end, &error), error);
	return frontend;
}

#endif
