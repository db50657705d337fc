/* SPDX-License-Identifier: Apache-2.0 */
/* The table of a far range's blocks: see far_table.h. */
#include "frontend/far_table.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#define KEPT_MAGIC 0x46415254u

static size_t kept_bytes(uint32_t blocks)
{
	return sizeof(struct iswi_far_kept) + blocks * sizeof(struct iswi_far_kept_block);
}

static int map_kept(struct iswi_far_table *table, int fd, uint32_t blocks, struct isw_error *error)
{
	size_t bytes = kept_bytes(blocks);
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
	if (attr.st_size == 0) {
		table->kept->magic = KEPT_MAGIC;
		table->kept->blocks = blocks;
	}
	if (table->kept->magic != KEPT_MAGIC || table->kept->blocks != blocks)
		return iswi_error(error, -EINVAL,
				  "the table of far memory is one of another device");
	return 0;
}

static int make_volatile(struct iswi_far_table *table)
{
	table->uses = calloc(table->blocks, sizeof(*table->uses));
	table->going = calloc(table->blocks, sizeof(*table->going));
	if (table->uses == NULL || table->going == NULL)
		return -ENOMEM;
	for (uint32_t i = 0; i < ISWI_FAR_CLIENTS_MAX; i++) {
		table->place[i] = malloc(table->blocks * sizeof(uint32_t));
		if (table->place[i] == NULL)
			return -ENOMEM;
		memset(table->place[i], 0xff, table->blocks * sizeof(uint32_t));
	}
	return 0;
}

/* What a predecessor gave. A block with a number or an owner that cannot be is of nobody. */
static void learn(struct iswi_far_table *table)
{
	for (uint32_t place = 0; place < table->blocks; place++) {
		struct iswi_far_kept_block *block = &table->kept->block[place];
		uint32_t owner = atomic_load(&block->owner);

		if (owner == 0)
			continue;
		if (owner > ISWI_FAR_CLIENTS_MAX || block->number >= table->blocks ||
		    table->place[owner - 1][block->number] != ISWI_FAR_NONE) {
			atomic_store(&block->owner, 0);
			continue;
		}
		table->place[owner - 1][block->number] = place;
		table->used++;
	}
}

int iswi_far_table_open(struct iswi_far_table *table, int fd, uint32_t blocks,
			struct isw_error *error)
{
	int code;

	*table = (struct iswi_far_table){.blocks = blocks};
	pthread_mutex_init(&table->lock, NULL);
	code = map_kept(table, fd, blocks, error);
	if (code == 0) {
		code = make_volatile(table);
		if (code != 0)
			iswi_error(error, code, "no memory for the table of far memory");
	}
	if (code != 0) {
		iswi_far_table_close(table);
		return code;
	}
	learn(table);
	return 0;
}

void iswi_far_table_close(struct iswi_far_table *table)
{
	for (uint32_t i = 0; i < ISWI_FAR_CLIENTS_MAX; i++)
		free(table->place[i]);
	free(table->uses);
	free(table->going);
	if (table->kept != NULL)
		munmap(table->kept, table->bytes);
	pthread_mutex_destroy(&table->lock);
	*table = (struct iswi_far_table){.kept = NULL};
}

/* Under the lock: the lowest free place, so that a job's end empties whole slabs. */
static uint32_t give(struct iswi_far_table *table, uint32_t client, uint32_t number)
{
	uint32_t place = table->free_from;

	while (place < table->blocks && atomic_load(&table->kept->block[place].owner) != 0)
		place++;
	table->free_from = place;
	if (place == table->blocks)
		return ISWI_FAR_NONE;
	table->kept->block[place].number = number;
	atomic_store(&table->kept->block[place].owner, client + 1);
	table->place[client][number] = place;
	table->used++;
	return place;
}

int iswi_far_place_get(struct iswi_far_table *table, uint32_t client, uint32_t number, bool make,
		       uint32_t *place_out)
{
	uint32_t place;
	int code = 0;

	if (number >= table->blocks)
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
		table->used--;
		table->free_from = ISWI_MIN(table->free_from, place);
	}
	pthread_mutex_unlock(&table->lock);
}

uint32_t iswi_far_place_next(struct iswi_far_table *table, uint32_t client, uint32_t from)
{
	uint32_t place;

	pthread_mutex_lock(&table->lock);
	for (place = from; place < table->blocks; place++)
		if (atomic_load(&table->kept->block[place].owner) == client + 1)
			break;
	if (place < table->blocks) {
		table->uses[place]++;
		table->going[place] = true;
	}
	pthread_mutex_unlock(&table->lock);
	return place < table->blocks ? place : ISWI_FAR_NONE;
}

uint32_t iswi_far_places_used(struct iswi_far_table *table)
{
	uint32_t used;

	pthread_mutex_lock(&table->lock);
	used = table->used;
	pthread_mutex_unlock(&table->lock);
	return used;
}
