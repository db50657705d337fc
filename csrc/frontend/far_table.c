/* SPDX-License-Identifier: Apache-2.0 */
/* The table of a far range's blocks: see far_table.h. */
#include "frontend/far_table.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

/* With the ring's version: a successor that does not understand the agents takes nothing over. */
#define KEPT_MAGIC (0x46415254u + (ISWF_VERSION << 8))

static size_t kept_bytes(uint32_t blocks)
{
	return sizeof(struct iswi_far_kept) + blocks * sizeof(struct iswi_far_kept_block);
}

static int map_kept(struct iswi_far_table *table, int fd, bool *is_new, struct isw_error *error)
{
	size_t bytes = kept_bytes(table->layout.blocks);
	struct stat attr;
	void *kept;

	if (fstat(fd, &attr) != 0)
		return iswi_error(error, -errno, "cannot look at the table of far memory: %s",
				  strerror(errno));
	if (attr.st_size == 0 && ftruncate(fd, (off_t)bytes) != 0)
		return iswi_error(error, -errno, "cannot size the table of far memory: %s",
				  strerror(errno));
	if (attr.st_size != 0 && (size_t)attr.st_size != bytes)
		return iswi_error(error, -EINVAL,
				  "the table of far memory is one of another device");
	kept = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_POPULATE, fd, 0);
	if (kept == MAP_FAILED)
		return iswi_error(error, -errno, "cannot map the table of far memory: %s",
				  strerror(errno));
	table->kept = kept;
	table->bytes = bytes;
	*is_new = atomic_load(&table->kept->magic) == 0;
	if (*is_new)
		memset(kept, 0, bytes);
	else if (table->kept->magic != KEPT_MAGIC || table->kept->blocks != table->layout.blocks)
		return iswi_error(
			error, -EINVAL,
			"the table of far memory is one of another device, or of another version");
	return 0;
}

/* Of the slabs that the far range has a part of; the first one may belong to others, too. */
static uint32_t slab_of(const struct iswi_far_table *table, uint32_t place)
{
	const struct iswi_far_layout *l = &table->layout;

	return (uint32_t)((l->offset + (uint64_t)place * ISWF_BLOCK_BYTES) / l->slab_bytes -
			  l->offset / l->slab_bytes);
}

static uint32_t first_place(const struct iswi_far_table *table, uint32_t slab)
{
	const struct iswi_far_layout *l = &table->layout;
	uint64_t begin = (l->offset / l->slab_bytes + slab) * l->slab_bytes, first;

	if (begin <= l->offset)
		return 0;
	first = (begin - l->offset + ISWF_BLOCK_BYTES - 1) / ISWF_BLOCK_BYTES;
	return (uint32_t)ISWI_MIN(first, l->blocks);
}

static int make_volatile(struct iswi_far_table *table)
{
	uint32_t blocks = table->layout.blocks;

	table->slabs = slab_of(table, blocks - 1) + 1;
	table->slab = calloc(table->slabs, sizeof(*table->slab));
	table->uses = calloc(blocks, sizeof(*table->uses));
	table->going = calloc(blocks, sizeof(*table->going));
	if (table->slab == NULL || table->uses == NULL || table->going == NULL)
		return -ENOMEM;
	for (uint32_t i = 0; i < ISWI_FAR_CLIENTS_MAX; i++) {
		size_t bytes = table->layout.numbers * sizeof(uint32_t);

		table->place[i] = malloc(bytes);
		if (table->place[i] == NULL)
			return -ENOMEM;
		memset(table->place[i], 0xff, bytes);
	}
	return 0;
}

static void enter_place(struct iswi_far_table *table, uint32_t place, uint32_t client,
			uint32_t number)
{
	struct iswi_far_slab *slab = &table->slab[slab_of(table, place)];

	if (slab->used++ == 0)
		slab->job = table->kept->clients[client].job;
	table->place[client][number] = place;
	table->used++;
}

/* What a predecessor gave. */
static int learn(struct iswi_far_table *table, struct isw_error *error)
{
	uint32_t blocks = table->layout.blocks;

	for (uint32_t place = 0; place < blocks; place++) {
		struct iswi_far_kept_block *block = &table->kept->block[place];
		uint32_t owner = atomic_load(&block->owner), number = block->number;

		if (owner == 0)
			continue;
		if (owner > ISWI_FAR_CLIENTS_MAX || number >= table->layout.numbers ||
		    atomic_load(&table->kept->clients[owner - 1].used) != 1 ||
		    table->place[owner - 1][number] != ISWI_FAR_NONE)
			return iswi_error(error, -EUCLEAN,
					  "the table of far memory is damaged: it gives block %u "
					  "to client %u as number %u; nothing was changed",
					  place, owner, number);
		enter_place(table, place, owner - 1, number);
	}
	return 0;
}

int iswi_far_table_open(struct iswi_far_table *table, int fd, const struct iswi_far_layout *layout,
			bool *is_new, struct isw_error *error)
{
	int code;

	*table = (struct iswi_far_table){.layout = *layout};
	pthread_mutex_init(&table->lock, NULL);
	code = map_kept(table, fd, is_new, error);
	if (code == 0) {
		code = make_volatile(table);
		if (code != 0)
			iswi_error(error, code, "no memory for the table of far memory");
	}
	if (code == 0)
		code = learn(table, error);
	if (code != 0)
		iswi_far_table_close(table);
	return code;
}

void iswi_far_table_begin(struct iswi_far_table *table)
{
	table->kept->blocks = table->layout.blocks;
	atomic_store(&table->kept->magic, KEPT_MAGIC);
}

void iswi_far_table_close(struct iswi_far_table *table)
{
	for (uint32_t i = 0; i < ISWI_FAR_CLIENTS_MAX; i++)
		free(table->place[i]);
	free(table->slab);
	free(table->uses);
	free(table->going);
	if (table->kept != NULL)
		munmap(table->kept, table->bytes);
	pthread_mutex_destroy(&table->lock);
	*table = (struct iswi_far_table){.kept = NULL};
}

/* How badly the slab suits a block of the job; the least is taken. */
static uint32_t rank_of(const struct iswi_far_table *table, uint32_t number, uint64_t job)
{
	const struct iswi_far_layout *l = &table->layout;
	const struct iswi_far_slab *slab = &table->slab[number];
	uint32_t device_slab = (uint32_t)(l->offset / l->slab_bytes) + number;
	uint32_t rank = l->is_mapped(l->ctx, device_slab) ? 0 : 3;

	if (slab->used == 0)
		return rank + 1;
	return slab->job == job ? rank : rank + 2;
}

/* Under the lock: the slab where the job's next block goes; ISWI_FAR_NONE: all are full. */
static uint32_t choose_slab(const struct iswi_far_table *table, uint64_t job)
{
	uint32_t best = ISWI_FAR_NONE, best_rank = UINT32_MAX;

	for (uint32_t i = 0; i < table->slabs && best_rank > 0; i++) {
		uint32_t rank;

		if (table->slab[i].used == first_place(table, i + 1) - first_place(table, i))
			continue;
		rank = rank_of(table, i, job);
		if (rank < best_rank) {
			best = i;
			best_rank = rank;
		}
	}
	return best;
}

/* Under the lock. */
static uint32_t give(struct iswi_far_table *table, uint32_t client, uint32_t number)
{
	uint32_t slab = choose_slab(table, table->kept->clients[client].job), place;

	if (slab == ISWI_FAR_NONE)
		return ISWI_FAR_NONE;
	place = first_place(table, slab);
	while (atomic_load(&table->kept->block[place].owner) != 0)
		place++; /* ends: the slab is not full */
	table->kept->block[place].number = number;
	atomic_store(&table->kept->block[place].owner, client + 1);
	enter_place(table, place, client, number);
	return place;
}

int iswi_far_place_get(struct iswi_far_table *table, uint32_t client, uint32_t number, bool make,
		       uint32_t *place_out)
{
	uint32_t place;
	int code = 0;

	if (number >= table->layout.numbers)
		return -EINVAL;
	pthread_mutex_lock(&table->lock);
	place = table->place[client][number];
	if (place == ISWI_FAR_NONE && make) {
		place = give(table, client, number);
		code = place == ISWI_FAR_NONE ? -ENOSPC : 0;
	} else if (place == ISWI_FAR_NONE) {
		code = -ENOENT;
	}
	if (code == 0 && table->going[place])
		code = -EINVAL;
	if (code == 0) {
		table->uses[place]++;
		*place_out = place;
	}
	pthread_mutex_unlock(&table->lock);
	return code;
}

void iswi_far_place_put(struct iswi_far_table *table, uint32_t place)
{
	pthread_mutex_lock(&table->lock);
	table->uses[place]--;
	pthread_mutex_unlock(&table->lock);
}

int iswi_far_place_close(struct iswi_far_table *table, uint32_t place)
{
	int code = 0;

	pthread_mutex_lock(&table->lock);
	if (table->uses[place] != 1)
		code = -EINVAL;
	else
		table->going[place] = true;
	pthread_mutex_unlock(&table->lock);
	return code;
}

void iswi_far_place_left(struct iswi_far_table *table, uint32_t place, bool discarded)
{
	struct iswi_far_kept_block *block = &table->kept->block[place];

	pthread_mutex_lock(&table->lock);
	table->uses[place]--;
	table->going[place] = false;
	if (discarded) {
		uint32_t client = atomic_load(&block->owner) - 1;

		atomic_store(&block->owner, 0);
		table->place[client][block->number] = ISWI_FAR_NONE;
		table->slab[slab_of(table, place)].used--;
		table->used--;
	}
	pthread_mutex_unlock(&table->lock);
}

uint32_t iswi_far_place_next(struct iswi_far_table *table, uint32_t client, uint32_t from)
{
	uint32_t place;

	pthread_mutex_lock(&table->lock);
	for (place = from; place < table->layout.blocks; place++)
		if (atomic_load(&table->kept->block[place].owner) == client + 1)
			break;
	if (place < table->layout.blocks) {
		table->uses[place]++;
		table->going[place] = true;
	}
	pthread_mutex_unlock(&table->lock);
	return place < table->layout.blocks ? place : ISWI_FAR_NONE;
}

uint32_t iswi_far_places_used(struct iswi_far_table *table)
{
	uint32_t used;

	pthread_mutex_lock(&table->lock);
	used = table->used;
	pthread_mutex_unlock(&table->lock);
	return used;
}
